"""What the overload program makes of answers; who is refused is in the integration tests."""

from __future__ import annotations

import random

import pytest
from helpers_gateway import MODEL, FakeBackend, serving

from deployments.config.gateway import GatewayConfig, StaticKey
from deployments.config.tiers import Tier
from deployments.routing.errors import ModelUnavailableError, OverloadedError
from load_tests.overload import KEYS, TIERS, TierOutcome, again, ask, capacity, client, play

pytestmark = pytest.mark.sockets

CONFIG = GatewayConfig(
    api_keys=tuple(StaticKey(key=key, tier=tier) for tier, key in KEYS.items()),
    tiers={tier: Tier(priority=i) for i, tier in enumerate(TIERS)},
    default_tier=TIERS[0],
)


async def test_all_are_served_where_there_is_room() -> None:
    with serving(FakeBackend(), CONFIG) as url:
        async with client(url) as http:
            assert await capacity(http, MODEL, 1) > 0
            outcomes = await play(http, MODEL, dict.fromkeys(TIERS, 40.0), 0.5, random.Random(1))
    assert [*outcomes] == [*TIERS]
    for outcome in outcomes.values():
        assert outcome.sent == len(outcome.ttft_s) > 0 and outcome.refused == 0 and not outcome.other
        assert 0 < outcome.ttft(0.5) <= outcome.ttft(0.99)


async def test_refusals_are_told_from_other_ends() -> None:
    refused, down, lost = TierOutcome(), TierOutcome(), TierOutcome()
    with serving(FakeBackend(fail=OverloadedError(0.05)), CONFIG) as url:
        async with client(url) as http:
            assert not await ask(http, MODEL, TIERS[0], 1, refused)
            assert await again(http, MODEL, refused) == 0.0
    with serving(FakeBackend(fail=ModelUnavailableError()), CONFIG) as url:
        async with client(url) as http:
            assert not await ask(http, MODEL, TIERS[0], 1, down)
    async with client(url) as http:
        assert not await ask(http, MODEL, TIERS[0], 1, lost)
    assert refused.retry_after_s == [pytest.approx(0.05, abs=0.001)] and refused.refused == 1.0 and not refused.other
    assert down.other == ["503 model_not_ready"] and lost.other == ["ConnectError"]

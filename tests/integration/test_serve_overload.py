"""Three tiers ask for far more than can be served: who is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers_server import MODEL, WAIT_S, Server

from load_tests.overload import SETTINGS, TIERS, TierOutcome, again, ask, capacity, client

pytestmark = pytest.mark.ray

# The two higher tiers together are fewer than the seats. The lowest would fill the queue many times over.
CLIENTS = dict(zip(TIERS, (3, 4, 60), strict=True))


async def test_the_lowest_tier_is_refused_first_and_told_when_to_come_again(_servers: Any) -> None:
    server: Server = _servers.get(*SETTINGS)
    outcomes = {tier: TierOutcome() for tier in TIERS}
    gold, silver, bronze = outcomes.values()
    over = asyncio.Event()

    async def crowd(tier: str, number: int) -> None:
        while not over.is_set():
            if not await ask(http, MODEL, tier, number, outcomes[tier]):
                await asyncio.sleep(0.2)

    async with client(server.url) as http:
        assert await capacity(http, MODEL, 5) > 0  # from now on the gateway knows how much is done in a second
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            for tier, number in CLIENTS.items():
                for i in range(number):
                    tasks.create_task(crowd(tier, i))
            while len(gold.ttft_s) < 20 or len(silver.ttft_s) < 20 or len(bronze.retry_after_s) < 40:
                await asyncio.sleep(0.1)
            over.set()
        # A moment in which even they are refused, after a pause of the machine, meets whoever asks just then.
        assert bronze.refused > 2 * silver.refused and gold.refused <= silver.refused + 0.2
        assert not any(outcome.other for outcome in outcomes.values())
        assert all(0 < seconds <= 120 for seconds in bronze.retry_after_s)
        assert await again(http, MODEL, bronze) == 1.0

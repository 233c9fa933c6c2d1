"""Leases: how seldom gateways ask, and that no lease, loss or failure lets more through than the limit."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from helpers_limits import LEASE_S, Bench, Clock, FakeHandle, claim, meter

from deployments.limits.actor import ActorStore, LimitHub
from deployments.limits.base import NOTHING, Amount, Claim, Grant, Kind, Refusal, StoreDownError
from deployments.limits.hub import Hub, Report
from deployments.limits.outage import Guarded

REQUESTS, TOKENS, CONCURRENT = Kind.REQUESTS, Kind.TOKENS, Kind.CONCURRENT


class Site:
    """A hub and its gateways."""

    def __init__(self, gateways: int) -> None:
        self.clock = Clock()
        self.handle: Any = FakeHandle(LimitHub(LEASE_S, self.clock))
        self.bench = Bench(self.clock, lambda: ActorStore(self.handle, LEASE_S, self.clock))
        self.gateways = [self.bench.gateway() for _ in range(gateways)]

    async def close(self) -> None:
        for gateway in self.gateways:
            await gateway.close()


async def test_far_from_the_limit_hardly_any_request_asks_the_hub() -> None:
    site = Site(1)
    (gateway,) = site.gateways
    limits = (meter(REQUESTS, 6000), meter(TOKENS, 1_000_000), meter(CONCURRENT, 200))
    for i in range(1000):
        outcome = await gateway.reserve(one := claim(*limits, tokens=100))
        assert isinstance(outcome, Grant)
        assert [state.used for state in outcome.states] == [i + 1, i * 50 + 100, 1]
        gateway.settle(one, Amount(1, 50))
    assert site.handle.calls <= 5
    states = await gateway.peek(limits, "acme")
    assert [state.used for state in states] == [1000, 50_000, 0]
    await site.close()


async def test_near_the_limit_there_are_no_leases() -> None:
    hub, limit = Hub(LEASE_S), meter(TOKENS, 1000)
    wanted = (limit,)
    first = hub.report(Report("a", 0, claims=(claim(limit, tokens=100),), wanted=wanted), 0.0)
    assert first.leases == {limit.name: 225}
    second = hub.report(Report("b", 0, claims=(claim(limit, tokens=500),), wanted=wanted), 0.0)
    assert second.leases == {limit.name: (1000 - 600 - 225) // 8}
    third = hub.report(Report("a", 1, claims=(claim(limit, tokens=300),), wanted=wanted), 0.0)
    assert third.leases == {}


async def test_a_report_that_comes_twice_counts_once() -> None:
    hub, limit = Hub(LEASE_S), meter(TOKENS, 1000)
    one = claim(limit, tokens=100)
    report = Report("a", 0, opened=(one,), closed=((one.id, Amount(1, 40)),), claims=(claim(limit, tokens=7),))
    assert hub.report(report, 0.0) == hub.report(report, 1.0)
    (states,) = hub.report(Report("a", 1, peeks=((limit,),)), 1.0).peeks
    assert states[0].used == 47


async def test_an_idle_gateways_lease_makes_nobody_wait_long() -> None:
    site = Site(2)
    idle, busy = site.gateways
    limit = meter(TOKENS, 1000)
    assert isinstance(await idle.reserve(claim(limit, tokens=1)), Grant)  # holds a lease of a quarter now
    assert isinstance(await busy.reserve(claim(limit, tokens=999)), Grant)
    refused = await busy.reserve(claim(limit, tokens=1))
    assert isinstance(refused, Refusal) and refused.state.used == 1000
    await site.close()


@pytest.mark.parametrize("seed", range(6))
async def test_several_gateways_never_exceed_a_limit_in_any_minute(seed: int) -> None:
    site, draw = Site(3), random.Random(seed)
    limits = (meter(REQUESTS, 60), meter(TOKENS, 1000), meter(CONCURRENT, 12))
    held: dict[str, tuple[float, int]] = {}  # when admitted, what still counts
    running: list[tuple[Any, Claim]] = []
    for _ in range(600):
        if draw.random() < 0.5:
            await site.bench.advance(draw.choice((0.02, 0.1, 0.6)))
        if running and draw.random() < 0.5:
            gateway, one = running.pop(draw.randrange(len(running)))
            spent = draw.randrange(one.amount.tokens + 1)
            gateway.settle(one, Amount(1, spent))
            held[one.id] = (held[one.id][0], spent)
        else:
            gateway = draw.choice(site.gateways)
            waiting = asyncio.ensure_future(gateway.reserve(one := claim(*limits, tokens=draw.randrange(1, 60))))
            while not waiting.done():  # others' leases come back as their gateways report
                await asyncio.gather(*(g.peek((), "acme") for g in site.gateways))
            if isinstance(waiting.result(), Grant):
                held[one.id] = (site.clock.now_s, one.amount.tokens)
                running.append((gateway, one))
        assert len(running) <= 12
        now_s = site.clock.now_s
        recent = [tokens for at_s, tokens in held.values() if now_s - 60 < at_s]
        assert sum(recent) <= 1000 and len(recent) <= 60
    await site.close()


async def test_a_hub_out_of_reach_fails_claims_and_leaves_nothing_behind() -> None:
    site = Site(1)
    (gateway,) = site.gateways
    limits = (meter(TOKENS, 100), meter(CONCURRENT, 2))
    running = claim(*limits, tokens=60)
    assert isinstance(await gateway.reserve(running), Grant)
    site.handle.down = True
    with pytest.raises(StoreDownError):
        await gateway.reserve(claim(*limits, tokens=30))
    with pytest.raises(StoreDownError):
        await gateway.peek(limits, "acme")
    gateway.settle(running, Amount(1, 10))
    site.handle.down = False
    for _ in range(500):
        try:
            used = [state.used for state in await gateway.peek(limits, "acme")]
        except StoreDownError:
            continue
        if used == [10, 0]:
            break
        await asyncio.sleep(0.01)
    assert used == [10, 0]
    await site.close()


async def test_what_the_lost_answer_granted_is_given_back() -> None:
    clock = Clock()
    hub = LimitHub(LEASE_S, clock)
    handle: Any = FakeHandle(hub)

    async def deaf(report: Any) -> Any:
        await hub.report(report)
        raise TimeoutError

    heard, handle._call = handle._call, deaf
    gateway, limits = ActorStore(handle, LEASE_S, clock), (meter(TOKENS, 100), meter(CONCURRENT, 1))
    with pytest.raises(StoreDownError):
        await gateway.reserve(claim(*limits, tokens=90))
    handle._call = heard
    for _ in range(500):
        try:
            if isinstance(outcome := await gateway.reserve(claim(*limits, tokens=90)), Grant):
                break
        except StoreDownError:
            pass
        await asyncio.sleep(0.01)
    assert isinstance(outcome, Grant)
    await gateway.close()


class Switch:
    """A store that can be down."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.down = False
        self.asked = 0

    async def reserve(self, one: Claim) -> Grant | Refusal:
        self.asked += 1
        if self.down:
            raise StoreDownError(2.0)
        outcome: Grant | Refusal = await self._store.reserve(one)
        return outcome

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("gateways", [None, 4])
async def test_policies_for_an_outage(gateways: int | None) -> None:
    clock = Clock()
    store: Any = Switch(
        Bench(clock, lambda: ActorStore(FakeHandle(LimitHub(LEASE_S, clock)), LEASE_S, clock)).gateway()
    )  # type: ignore[arg-type]
    guarded, limits = Guarded(store, gateways, clock), (meter(TOKENS, 100), meter(CONCURRENT, 10))
    before = claim(*limits, tokens=50)
    assert isinstance(await guarded.reserve(before), Grant)
    store.down = True
    if gateways is None:
        for wait_s in (2.0, 2.0, 1.0):
            clock.now_s += 2.0 - wait_s
            with pytest.raises(StoreDownError) as refused:
                await guarded.reserve(claim(*limits, tokens=1))
            assert refused.value.retry_after_s == pytest.approx(wait_s, abs=0.01)
        assert store.asked == 2  # while it is known to be down, nobody waits for it again
    else:
        during = claim(*limits, tokens=25)
        outcome = await guarded.reserve(during)
        assert isinstance(outcome, Grant)
        assert [state.meter.limit for state in outcome.states] == [25, 2]
        assert isinstance(await guarded.reserve(claim(*limits, tokens=1)), Refusal)
        guarded.settle(during, NOTHING)
        assert isinstance(await guarded.reserve(claim(*limits, tokens=1)), Grant)
    guarded.settle(before, Amount(1, 20))
    store.down = False
    clock.now_s += 2.0
    after = await guarded.reserve(claim(*limits, tokens=80))
    assert isinstance(after, Grant) and after.states[0].used == 100
    await guarded.close()

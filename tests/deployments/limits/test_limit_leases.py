"""Leases: how seldom gateways ask, and that no lease, loss or failure lets more through than the limit."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import pytest
from helpers_limits import LEASE_S, Bench, Clock, FakeHandle, make_limit, make_reservation

from deployments.limits.actor import ActorStore, LimitCounters
from deployments.limits.base import NOTHING, Amount, Grant, LimitKind, LimitStoreDownError, Refusal, Reservation
from deployments.limits.memory import MemoryStore
from deployments.limits.outage import OutageGuard
from deployments.limits.shared_counters import GatewayReport, SharedCounters

REQUESTS, TOKENS, CONCURRENT = LimitKind.REQUESTS, LimitKind.TOKENS, LimitKind.CONCURRENT


class Site:
    """Shared counters and their gateways."""

    def __init__(self, gateways: int) -> None:
        self.clock = Clock()
        self.handle: Any = FakeHandle(LimitCounters(LEASE_S, self.clock))
        self.bench = Bench(self.clock, lambda: ActorStore(self.handle, LEASE_S, self.clock))
        self.gateways = [self.bench.gateway() for _ in range(gateways)]

    async def close(self) -> None:
        for gateway in self.gateways:
            await gateway.close()


async def test_far_from_the_limit_hardly_any_request_asks() -> None:
    site = Site(1)
    (gateway,) = site.gateways
    limits = (make_limit(REQUESTS, 6000), make_limit(TOKENS, 1_000_000), make_limit(CONCURRENT, 200))
    for i in range(1000):
        outcome = await gateway.reserve(one := make_reservation(*limits, tokens=100))
        assert isinstance(outcome, Grant)
        assert [state.used for state in outcome.states] == [i + 1, i * 50 + 100, 1]
        gateway.settle(one, Amount(1, 50))
    assert site.handle.calls <= 5
    states = await gateway.peek(limits, "acme")
    assert [state.used for state in states] == [1000, 50_000, 0]
    await site.close()


async def test_near_the_limit_there_are_no_leases() -> None:
    shared, limit = SharedCounters(LEASE_S), make_limit(TOKENS, 1000)
    wanted = (limit,)

    def asked(tokens: int) -> tuple[Reservation, ...]:
        return (make_reservation(limit, tokens=tokens),)

    first = shared.report(GatewayReport("a", 0, reservations=asked(100), wanted=wanted), 0.0)
    assert first.leases == {limit.name: 225}
    second = shared.report(GatewayReport("b", 0, reservations=asked(500), wanted=wanted), 0.0)
    assert second.leases == {limit.name: (1000 - 600 - 225) // 8}
    third = shared.report(GatewayReport("a", 1, reservations=asked(300), wanted=wanted), 0.0)
    assert third.leases == {}


async def test_a_report_that_comes_twice_counts_once() -> None:
    shared, limit = SharedCounters(LEASE_S), make_limit(TOKENS, 1000)
    one = make_reservation(limit, tokens=100)
    report = GatewayReport(
        "a", 0, opened=(one,), closed=((one.id, Amount(1, 40)),), reservations=(make_reservation(limit, tokens=7),)
    )
    assert shared.report(report, 0.0) == shared.report(report, 1.0)
    (states,) = shared.report(GatewayReport("a", 1, peeks=((limit,),)), 1.0).peeks
    assert states[0].used == 47


async def test_an_idle_gateways_lease_makes_nobody_wait_long() -> None:
    site = Site(2)
    idle, busy = site.gateways
    limit = make_limit(TOKENS, 1000)
    assert isinstance(await idle.reserve(make_reservation(limit, tokens=1)), Grant)  # holds a lease of a quarter now
    assert isinstance(await busy.reserve(make_reservation(limit, tokens=999)), Grant)
    refused = await busy.reserve(make_reservation(limit, tokens=1))
    assert isinstance(refused, Refusal) and refused.state.used == 1000
    await site.close()


@pytest.mark.parametrize("seed", range(6))
async def test_several_gateways_never_exceed_a_limit_in_any_minute(seed: int) -> None:
    site, draw = Site(3), random.Random(seed)
    limits = (make_limit(REQUESTS, 60), make_limit(TOKENS, 1000), make_limit(CONCURRENT, 12))
    held: dict[str, tuple[float, int]] = {}  # when admitted, what still counts
    running: list[tuple[Any, Reservation]] = []
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
            waiting = asyncio.ensure_future(
                gateway.reserve(one := make_reservation(*limits, tokens=draw.randrange(1, 60)))
            )
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


async def test_counters_out_of_reach_fail_reservations_and_leave_nothing_behind() -> None:
    site = Site(1)
    (gateway,) = site.gateways
    limits = (make_limit(TOKENS, 100), make_limit(CONCURRENT, 2))
    running = make_reservation(*limits, tokens=60)
    assert isinstance(await gateway.reserve(running), Grant)
    site.handle.down = True
    with pytest.raises(LimitStoreDownError):
        await gateway.reserve(make_reservation(*limits, tokens=30))
    with pytest.raises(LimitStoreDownError):
        await gateway.peek(limits, "acme")
    gateway.settle(running, Amount(1, 10))
    site.handle.down = False
    for _ in range(500):
        try:
            used = [state.used for state in await gateway.peek(limits, "acme")]
        except LimitStoreDownError:
            continue
        if used == [10, 0]:
            break
        await asyncio.sleep(0.01)
    assert used == [10, 0]
    await site.close()


async def test_what_the_lost_answer_granted_is_given_back() -> None:
    clock = Clock()
    handle: Any = FakeHandle(LimitCounters(LEASE_S, clock))
    handle.deaf = True
    gateway, limits = ActorStore(handle, LEASE_S, clock), (make_limit(TOKENS, 100), make_limit(CONCURRENT, 1))
    with pytest.raises(LimitStoreDownError):
        await gateway.reserve(make_reservation(*limits, tokens=90))
    handle.deaf = False
    for _ in range(500):
        try:
            if isinstance(outcome := await gateway.reserve(make_reservation(*limits, tokens=90)), Grant):
                break
        except LimitStoreDownError:
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

    async def reserve(self, one: Reservation) -> Grant | Refusal:
        self.asked += 1
        if self.down:
            raise LimitStoreDownError(2.0)
        outcome: Grant | Refusal = await self._store.reserve(one)
        return outcome

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


async def test_reservations_that_are_refused_during_an_outage_are_not_remembered() -> None:
    clock = Clock()
    store: Any = Switch(MemoryStore(clock))  # type: ignore[arg-type]
    store.down = True
    guarded, limit = OutageGuard(store, 1, clock), make_limit(TOKENS, 10)
    for _ in range(1000):
        assert isinstance(await guarded.reserve(make_reservation(limit, tokens=11)), Refusal)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(1000):
        await guarded.reserve(make_reservation(limit, tokens=11))
    gc.collect()
    assert len(gc.get_objects()) < before + 100


async def test_restarted_counters_learn_again_what_runs() -> None:
    clock, limit = Clock(), make_limit(CONCURRENT, 2)
    handle = FakeHandle(LimitCounters(LEASE_S, clock))
    store = ActorStore(handle, LEASE_S, clock)  # type: ignore[arg-type]
    running = [make_reservation(limit), make_reservation(limit)]
    for one in running:
        assert isinstance(await store.reserve(one), Grant)
    handle.counters = LimitCounters(LEASE_S, clock)
    await store.peek((limit,), "acme")
    for _ in range(100):
        if (await store.peek((limit,), "acme"))[0].used == 2:
            break
        await asyncio.sleep(0.01)
    assert isinstance(await store.reserve(make_reservation(limit)), Refusal)
    store.settle(running[0], NOTHING)
    assert isinstance(await store.reserve(make_reservation(limit)), Grant)
    await store.close()


@pytest.mark.parametrize("gateways", [None, 4])
async def test_policies_for_an_outage(gateways: int | None) -> None:
    clock = Clock()
    store: Any = Switch(
        Bench(clock, lambda: ActorStore(FakeHandle(LimitCounters(LEASE_S, clock)), LEASE_S, clock)).gateway()
    )  # type: ignore[arg-type]
    guarded, limits = OutageGuard(store, gateways, clock), (make_limit(TOKENS, 100), make_limit(CONCURRENT, 10))
    before = make_reservation(*limits, tokens=50)
    assert isinstance(await guarded.reserve(before), Grant)
    store.down = True
    if gateways is None:
        for wait_s in (2.0, 2.0, 1.0):
            clock.now_s += 2.0 - wait_s
            with pytest.raises(LimitStoreDownError) as refused:
                await guarded.reserve(make_reservation(*limits, tokens=1))
            assert refused.value.retry_after_s == pytest.approx(wait_s, abs=0.01)
        assert store.asked == 2  # while it is known to be down, nobody waits for it again
    else:
        during = make_reservation(*limits, tokens=25)
        outcome = await guarded.reserve(during)
        assert isinstance(outcome, Grant)
        assert [state.limit.maximum for state in outcome.states] == [25, 2]
        assert isinstance(await guarded.reserve(make_reservation(*limits, tokens=1)), Refusal)
        guarded.settle(during, NOTHING)
        assert isinstance(await guarded.reserve(make_reservation(*limits, tokens=1)), Grant)
    guarded.settle(before, Amount(1, 20))
    store.down = False
    clock.now_s += 2.0
    after = await guarded.reserve(make_reservation(*limits, tokens=80))
    assert isinstance(after, Grant) and after.states[0].used == 100
    await guarded.close()

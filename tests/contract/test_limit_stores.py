"""What every limit store promises. A new name in STORES is tested by standing there; helpers_limits makes it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator

import pytest
import redis
from helpers_limits import LEASE_S, Bench, bench, make_limit, make_reservation, redis_server

from deployments.config.limits import STORES
from deployments.limits.base import NOTHING, Amount, Grant, LimitKind, LimitStore, Refusal, Reservation
from deployments.limits.counters import Counters

REQUESTS, TOKENS, CONCURRENT = LimitKind.REQUESTS, LimitKind.TOKENS, LimitKind.CONCURRENT
SHARED = [name for name in STORES.names() if name != "memory"]


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
async def made(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    redis_url = ""
    if request.param == "redis":
        redis_url = request.getfixturevalue("redis_url")
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
    async with bench(request.param, redis_url) as ready:
        yield ready


every_store = pytest.mark.parametrize("made", STORES.names(), indirect=True)
shared_stores = pytest.mark.parametrize("made", SHARED, indirect=True)


async def used(store: LimitStore, one: Reservation, kind: LimitKind) -> list[int]:
    states = await store.peek(one.limits, one.org)
    return [state.used for state in states if state.limit.kind is kind]


async def until_used(store: LimitStore, one: Reservation, kind: LimitKind, expected: int) -> None:
    """Settlements may reach a shared store a moment later."""
    for _ in range(500):
        if await used(store, one, kind) == [expected]:
            return
        await asyncio.sleep(0.01)
    assert await used(store, one, kind) == [expected]


@pytest.mark.sockets
@every_store
async def test_grants_up_to_the_limit_and_again_when_it_said(made: Bench) -> None:
    store, limit = made.gateway(), make_limit(REQUESTS, 3)
    for left in (2, 1, 0):
        outcome = await store.reserve(make_reservation(limit))
        assert isinstance(outcome, Grant) and outcome.states[0].remaining == left
        await made.advance(0.5)
    refused = await store.reserve(make_reservation(limit))
    assert isinstance(refused, Refusal)
    assert refused.state.limit == limit and refused.state.used == 3 and refused.requested == 1
    assert refused.retry_after_s is not None and 58 < refused.retry_after_s <= 60.2
    await made.advance(refused.retry_after_s - 0.2)
    assert isinstance(await store.reserve(make_reservation(limit)), Refusal)
    await made.advance(0.2)
    assert isinstance(await store.reserve(make_reservation(limit)), Grant)
    assert isinstance(await store.reserve(make_reservation(limit)), Refusal)


@pytest.mark.sockets
@pytest.mark.slow
@every_store
async def test_reset_is_when_all_is_free(made: Bench) -> None:
    store, limit = made.gateway(), make_limit(TOKENS, 100)
    outcome = await store.reserve(make_reservation(limit, tokens=60))
    (state,) = await store.peek((limit,), "acme")
    assert isinstance(outcome, Grant) and (state.used, state.remaining) == (60, 40)
    assert 59 < state.reset_s <= 60.2
    await made.advance(state.reset_s)
    (state,) = await store.peek((limit,), "acme")
    assert (state.used, state.reset_s) == (0, 0.0)


@pytest.mark.sockets
@every_store
async def test_settling_gives_back_what_was_not_used(made: Bench) -> None:
    store, limit = made.gateway(), make_limit(TOKENS, 100)
    first, second = make_reservation(limit, tokens=90), make_reservation(limit, tokens=80)
    assert isinstance(await store.reserve(first), Grant)
    assert isinstance(await store.reserve(second), Refusal)
    store.settle(first, Amount(1, 20))
    store.settle(first, NOTHING)  # it is not open any more
    await until_used(store, second, TOKENS, 20)
    assert isinstance(await store.reserve(second), Grant)
    store.settle(second, NOTHING)
    await until_used(store, second, TOKENS, 20)


@pytest.mark.sockets
@every_store
async def test_what_was_used_beyond_the_reservation_counts(made: Bench) -> None:
    """An upstream may ignore max_tokens, or bill thinking that nobody sees."""
    store, limit = made.gateway(), make_limit(TOKENS, 1000)
    one = make_reservation(limit, tokens=100)
    assert isinstance(await store.reserve(one), Grant)
    await made.advance(1.0)
    store.settle(one, Amount(1, 5000))
    await until_used(store, one, TOKENS, 5000)
    await made.advance(59.5)  # what was reserved has left, and what came later has not
    await until_used(store, one, TOKENS, 4900)
    await made.advance(1.0)
    await until_used(store, one, TOKENS, 0)


@pytest.mark.sockets
@every_store
async def test_what_is_settled_after_its_minute_gives_nothing_back(made: Bench) -> None:
    store, limit = made.gateway(), make_limit(TOKENS, 100)
    slow, quick = make_reservation(limit, tokens=90), make_reservation(limit, tokens=70)
    assert isinstance(await store.reserve(slow), Grant)
    await made.advance(61)
    assert isinstance(await store.reserve(quick), Grant)
    store.settle(slow, NOTHING)
    await asyncio.sleep(0.05)
    assert await used(store, quick, TOKENS) == [70]


@pytest.mark.sockets
@every_store
async def test_places_are_free_at_the_end(made: Bench) -> None:
    store, limit = made.gateway(), make_limit(CONCURRENT, 2)
    running = [make_reservation(limit), make_reservation(limit)]
    for one in running:
        assert isinstance(await store.reserve(one), Grant)
    refused = await store.reserve(make_reservation(limit))
    assert isinstance(refused, Refusal) and refused.retry_after_s == 1.0
    for one in running:
        store.settle(one, NOTHING)
    await until_used(store, running[0], CONCURRENT, 0)


@pytest.mark.sockets
@every_store
async def test_all_or_nothing_over_levels(made: Bench) -> None:
    store = made.gateway()
    key = (make_limit(REQUESTS, 5), make_limit(TOKENS, 1000), make_limit(CONCURRENT, 5))
    org = (make_limit(TOKENS, 100, "org:acme"),)
    assert isinstance(await store.reserve(make_reservation(*key, *org, tokens=80)), Grant)
    refused = await store.reserve(make_reservation(*key, *org, tokens=40))
    assert isinstance(refused, Refusal) and refused.state.limit == org[0] and refused.state.used == 80
    states = await store.peek(key + org, "acme")
    assert [state.used for state in states] == [1, 80, 1, 80]


@pytest.mark.sockets
@every_store
async def test_what_can_never_fit_is_told_so(made: Bench) -> None:
    store, limit = made.gateway(), make_limit(TOKENS, 100)
    await store.reserve(make_reservation(limit, tokens=99))
    refused = await store.reserve(make_reservation(limit, make_limit(REQUESTS, 9), tokens=101))
    assert isinstance(refused, Refusal) and refused.retry_after_s is None
    assert refused.state.limit == limit and refused.requested == 101
    assert isinstance(await store.reserve(make_reservation(limit, tokens=1)), Grant)


@pytest.mark.sockets
@every_store
async def test_two_hundred_at_once_get_all_of_it_and_no_more(made: Bench) -> None:
    store, limits = made.gateway(), (make_limit(TOKENS, 1000), make_limit(TOKENS, 5000, "org:acme"))
    outcomes = await asyncio.gather(*(store.reserve(make_reservation(*limits, tokens=30)) for _ in range(200)))
    assert sum(isinstance(outcome, Grant) for outcome in outcomes) == 33
    states = await store.peek(limits, "acme")
    assert [state.used for state in states] == [990, 990]


@pytest.mark.sockets
@shared_stores
async def test_gateways_share_a_limit_exactly(made: Bench) -> None:
    gateways, limit = [made.gateway() for _ in range(4)], make_limit(TOKENS, 1000)
    for gateway in gateways:  # each has a lease now, if the store leases
        assert isinstance(await gateway.reserve(make_reservation(limit, tokens=5)), Grant)
    outcomes = await asyncio.gather(
        *(g.reserve(make_reservation(limit, tokens=7)) for g in gateways for _ in range(50))
    )
    granted = 20 + 7 * sum(isinstance(outcome, Grant) for outcome in outcomes)
    assert 993 < granted <= 1000
    assert await used(gateways[0], make_reservation(limit), TOKENS) == [granted]


@pytest.mark.sockets
@shared_stores
async def test_what_a_killed_gateway_held_after_the_lease_time(made: Bench) -> None:
    """Its sequences are free. Its tokens may have been used, so they count for their minute."""
    dying, living = made.gateway(), made.gateway()
    limits = (make_limit(TOKENS, 1000), make_limit(CONCURRENT, 1))
    assert isinstance(await dying.reserve(make_reservation(*limits, tokens=900)), Grant)
    await dying.peek(limits, "acme")
    made.kill(dying)
    await made.advance(LEASE_S - 0.5, alive=(living,))
    assert isinstance(await living.reserve(make_reservation(*limits, tokens=100)), Refusal)
    await made.advance(0.6, alive=(living,))
    refused = await living.reserve(make_reservation(*limits, tokens=101))
    assert isinstance(refused, Refusal) and refused.state.limit == limits[0]
    assert isinstance(await living.reserve(make_reservation(*limits, tokens=100)), Grant)


@pytest.mark.sockets
@shared_stores
async def test_a_gateway_that_was_only_silent_has_its_running_sequences_counted_again(made: Bench) -> None:
    silent, living = made.gateway(), made.gateway()
    limits = (make_limit(TOKENS, 1000), make_limit(CONCURRENT, 2))
    running = [make_reservation(*limits, tokens=100) for _ in range(2)]
    for one in running:
        assert isinstance(await silent.reserve(one), Grant)
    await silent.peek(limits, "acme")
    await made.advance(LEASE_S + 0.1, alive=(living,))
    await living.reserve(probe := make_reservation(make_limit(CONCURRENT, 9, "key:other")))  # has the dead forgotten
    living.settle(probe, NOTHING)
    await until_used(living, running[0], CONCURRENT, 0)
    await made.advance(0.1, alive=(silent, living))
    await until_used(living, running[0], CONCURRENT, 2)
    assert isinstance(await living.reserve(make_reservation(*limits, tokens=1)), Refusal)
    assert await used(living, running[0], TOKENS) == [200]
    silent.settle(running[0], Amount(1, 30))
    await until_used(living, running[0], CONCURRENT, 1)
    silent.settle(running[1], Amount(1, 30))
    await until_used(living, running[0], CONCURRENT, 0)


@pytest.mark.sockets
@every_store
async def test_a_cancelled_reservation_leaves_nothing(made: Bench) -> None:
    store, limits = made.gateway(), (make_limit(TOKENS, 1000), make_limit(CONCURRENT, 100))
    draw = random.Random(1)
    for _ in range(40):
        task = asyncio.ensure_future(store.reserve(one := make_reservation(*limits, tokens=10)))
        for _ in range(draw.randrange(12)):
            await asyncio.sleep(0)
        if not task.cancel():
            store.settle(one, NOTHING)
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(result, Grant):
            store.settle(one, NOTHING)
    probe = make_reservation(*limits)
    await until_used(store, probe, CONCURRENT, 0)
    await until_used(store, probe, TOKENS, 0)


@pytest.mark.sockets
@every_store
async def test_any_history_goes_as_in_counters(made: Bench) -> None:
    """The arithmetic is the counters's in every store: same verdicts, same waits, same counts."""
    store, counters, draw = made.gateway(), Counters(), random.Random(7)
    limits = (
        make_limit(REQUESTS, 12),
        make_limit(TOKENS, 300),
        make_limit(CONCURRENT, 4),
        make_limit(TOKENS, 500, "org:acme"),
    )
    open_reservations: list[Reservation] = []
    for _ in range(150):
        await made.advance(draw.choice((0.0, 0.0, 0.05, 0.3, 2.0, 7.0)))
        if open_reservations and draw.random() < 0.5:
            ending = open_reservations.pop(draw.randrange(len(open_reservations)))
            spent = Amount(draw.randrange(2), draw.randrange(ending.amount.tokens + 40))
            store.settle(ending, spent)
            counters.settle(ending.id, spent, made.clock.now_s)
        else:
            one = make_reservation(*limits, tokens=draw.randrange(1, 120))
            outcome, expected = await store.reserve(one), counters.reserve(one, made.clock.now_s)
            assert type(outcome) is type(expected)
            if isinstance(outcome, Refusal) and isinstance(expected, Refusal):
                assert outcome.state.limit == expected.state.limit
                assert outcome.retry_after_s == pytest.approx(expected.retry_after_s, abs=0.003)
            else:
                open_reservations.append(one)
        expected_used = [state.used for state in counters.peek(limits, made.clock.now_s)]
        for _ in range(500):
            if [state.used for state in await store.peek(limits, "acme")] == expected_used:
                break
            await asyncio.sleep(0.005)
        assert [state.used for state in await store.peek(limits, "acme")] == expected_used


@pytest.mark.sockets
@every_store
async def test_a_clock_that_steps_back_locks_nobody_out_for_more_than_a_minute(made: Bench) -> None:
    store, limit = made.gateway(), make_limit(TOKENS, 100)
    one = make_reservation(limit, tokens=100)
    assert isinstance(await store.reserve(one), Grant)
    store.settle(one, one.amount)
    await store.peek((limit,), "acme")
    made.clock.now_s -= 30
    refused = await store.reserve(make_reservation(limit, tokens=1))
    assert isinstance(refused, Refusal) and refused.retry_after_s is not None and refused.retry_after_s <= 60.2
    await made.advance(refused.retry_after_s)
    assert isinstance(await store.reserve(make_reservation(limit, tokens=100)), Grant)


@pytest.mark.sockets
@every_store
async def test_open_claims_stay_open_while_the_gateway_lives(made: Bench) -> None:
    store, limit = made.gateway(), make_limit(CONCURRENT, 1)
    assert isinstance(await store.reserve(make_reservation(limit)), Grant)
    await made.advance(LEASE_S * 4)
    assert isinstance(await store.reserve(make_reservation(limit)), Refusal)

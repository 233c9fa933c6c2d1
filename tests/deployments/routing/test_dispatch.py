"""A request's way through destinations that serve it, refuse it, hang, and break off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from helpers_routing import BegunStream
from helpers_upstream import DONE, EVENT_STREAM, StandIn, event, said

from deployments.channel.errors import ReplicaFaultError, StreamLostError, StreamReturnedError
from deployments.config.failures import Failure
from deployments.config.routing_table import Limits
from deployments.routing.circuit import State
from deployments.routing.destinations import RoutedRequest, UpstreamDestination
from deployments.routing.dispatch import Dispatcher
from deployments.routing.errors import (
    ModelUnavailableError,
    OverloadedError,
    RepeatedLossError,
    ReplicaLostError,
    UnusableOutputError,
)
from deployments.routing.hints import RoutingHints
from deployments.routing.plan import RoutePlan
from deployments.upstream.errors import UpstreamRefusedError, UpstreamUnreadError
from engine.errors import ContextLengthError, EngineDeadError, InvalidRequestError, QueueFullError
from engine.types import FinishReason, GenerateRequest, SamplingParams, TokenDelta

WORDS = ("one ", "two ", "three ", "four")
TEXT = "".join(WORDS)
SOON_S = 0.25  # in which even a machine that is busy elsewhere gets to what is ready
REQUEST = GenerateRequest("r", (1, 2), SamplingParams(max_tokens=4, seed=1))
HINTS = RoutingHints("/chat/completions", {"model": "m", "messages": []})

Step = int | Exception | asyncio.Event


@dataclass
class FakePool:
    """A pool whose engine says WORDS. `scripts`: what each attempt does before going on without end: an error is
    raised, an event is waited for, a number is how many tokens come."""

    scripts: list[Sequence[Step]] = field(default_factory=list)
    weights: str | None = "w"
    up: bool = True
    cold_start: Any = None
    may_recover: bool = False
    successor_expected: bool = False
    asked: list[RoutedRequest] = field(default_factory=list)
    closed: int = 0

    def may_have(self, weights: str) -> bool:
        return self.weights == weights

    def up_with(self, weights: str) -> bool:
        return self.up and self.weights == weights

    def suspects(self, error: Exception) -> bool:
        return isinstance(error, TimeoutError)

    async def begin(self, request: RoutedRequest) -> BegunStream:
        return await BegunStream.of(self.play(request), request.first_token_s, self.weights)

    async def play(self, ask: RoutedRequest) -> AsyncGenerator[list[TokenDelta], None]:
        self.asked.append(ask)
        script = self.scripts.pop(0) if self.scripts else ()
        answers = [_answer(request) for request in ask.requests]
        try:
            for step in script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                    continue
                for _ in range(step):
                    yield [answer.pop(0) for answer in answers if answer]
            while any(answers):
                yield [answer.pop(0) for answer in answers if answer]
        finally:
            self.closed += 1


def _answer(request: GenerateRequest) -> list[TokenDelta]:
    had = request.resumed_tokens
    deltas = []
    for count in range(had + 1, len(WORDS) + 1):
        text = "".join(WORDS[:count]) if count == had + 1 else WORDS[count - 1]
        reason = FinishReason.LENGTH if count == len(WORDS) else None
        deltas.append(
            TokenDelta(request.request_id, 0, (count,), text, finish_reason=reason, num_completion_tokens=count)
        )
    return deltas


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plan(*names: str, shadows: tuple[str, ...] = (), **limits: Any) -> RoutePlan:
    return RoutePlan(names, shadows, 0.5, Limits(**limits))


async def run(
    destinations: dict[str, Any],
    route: RoutePlan,
    requests: Sequence[GenerateRequest] = (REQUEST,),
    clock: Clock | None = None,
) -> str:
    return await answer(Dispatcher(destinations, clock or Clock()), route, requests)


async def answer(d: Dispatcher, route: RoutePlan, requests: Sequence[GenerateRequest] = (REQUEST,)) -> str:
    seen: list[TokenDelta] = []
    async for deltas in d.generate(RoutedRequest(tuple(requests), True, HINTS), route):
        seen += deltas
    assert [d.finish_reason is not None for d in seen].count(True) == len(requests)
    assert {d.request_id for d in seen} == {r.request_id for r in requests}
    return "".join(d.text for d in seen if d.request_id == requests[0].request_id)


async def test_the_first_place_serves_it() -> None:
    a, b = FakePool(), FakePool()
    assert await run({"a": a, "b": b}, plan("a", "b")) == TEXT
    assert not b.asked and a.closed == 1 and a.asked[0].queue_share == 0.5


FAILURES: list[tuple[Exception, Failure]] = [
    (StreamLostError("gone"), Failure.ERROR),
    (EngineDeadError("dead"), Failure.ERROR),
    (ReplicaFaultError("boom"), Failure.ERROR),
    (QueueFullError("full"), Failure.OVERLOADED),
    (OverloadedError(3.0), Failure.OVERLOADED),
    (ContextLengthError("long", "prompt"), Failure.CONTEXT),
]


@pytest.mark.parametrize(("error", "failure"), FAILURES, ids=lambda v: repr(v))
async def test_a_failure_before_the_first_token_goes_to_the_next_place(error: Exception, failure: Failure) -> None:
    a, b = FakePool([[error]]), FakePool()
    assert await run({"a": a, "b": b}, plan("a", "b")) == TEXT
    a, b = FakePool([[error]]), FakePool()
    with pytest.raises((type(error), ModelUnavailableError)):
        await run({"a": a, "b": b}, plan("a", "b", retry_on=frozenset(Failure) - {failure}))
    assert not b.asked


async def test_a_place_that_is_down_is_not_asked() -> None:
    a, b = FakePool(up=False), FakePool()
    assert await run({"a": a, "b": b}, plan("a", "b")) == TEXT and not a.asked
    with pytest.raises(ModelUnavailableError):
        await run({"a": a}, plan("a"))


@pytest.mark.parametrize("error", [InvalidRequestError("no", "x"), UpstreamRefusedError("no")], ids=repr)
async def test_what_is_wrong_in_itself_goes_nowhere_else(error: Exception) -> None:
    a, b = FakePool([[error]]), FakePool()
    with pytest.raises(type(error)):
        await run({"a": a, "b": b}, plan("a", "b"))
    assert not b.asked


async def test_the_client_hears_of_the_overload_and_when_to_return() -> None:
    a, b = FakePool([[OverloadedError(7.0)]]), FakePool([[StreamLostError("x")]])
    with pytest.raises(OverloadedError) as refused:
        await run({"a": a, "b": b}, plan("a", "b"))
    assert refused.value.retry_after_s == 7.0


async def test_no_first_token_in_time() -> None:
    a, b = FakePool([[asyncio.Event()]]), FakePool()
    assert await run({"a": a, "b": b}, plan("a", "b", first_token_s=SOON_S)) == TEXT
    assert a.closed == 1


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("error", [StreamLostError("gone"), EngineDeadError("dead"), ReplicaFaultError("x")], ids=repr)
async def test_a_replica_lost_later_is_not_noticed(tokens: int, error: Exception) -> None:
    a = FakePool([[tokens, error]])
    assert await run({"a": a}, plan("a")) == TEXT
    [first, second] = a.asked
    assert first.requests[0].prompt == (1, 2)
    assert second.requests[0].prompt == (1, 2, *range(1, tokens + 1))
    assert second.requests[0].resumed_tokens == tokens and second.queue_share > 1


async def test_a_request_that_was_on_two_lost_replicas_is_not_given_to_a_third() -> None:
    a = FakePool([[1, StreamLostError("gone")]] * 5)
    with pytest.raises(RepeatedLossError):
        await run({"a": a}, plan("a", max_resumptions=9))
    assert len(a.asked) == 2


async def test_replicas_that_hand_a_request_back_are_not_lost() -> None:
    a = FakePool([[1, StreamReturnedError("drained")]] * 3)
    assert await run({"a": a}, plan("a", max_resumptions=9)) == TEXT


async def test_only_as_often_as_the_route_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.routing.losses.PROGRESS", 1)  # each loss came after progress enough
    for limit in (0, 1, 2):
        a = FakePool([[1, StreamLostError("gone")]] * 5)
        with pytest.raises(ReplicaLostError):
            await run({"a": a}, plan("a", max_resumptions=limit))
        assert len(a.asked) == 1 + limit


async def test_an_answer_goes_on_only_with_the_same_weights() -> None:
    a, b, c = FakePool([[2, StreamLostError("gone")], [StreamLostError("gone")]]), FakePool(weights="x"), FakePool()
    assert await run({"a": a, "b": b, "c": c}, plan("a", "b", "c")) == TEXT
    assert not b.asked and len(c.asked) == 1
    a = FakePool([[2, StreamLostError("gone")], [StreamLostError("gone")]])
    with pytest.raises(ReplicaLostError):
        await run({"a": a, "b": b}, plan("a", "b"))


async def test_each_unfinished_prompt_goes_on() -> None:
    requests = [REQUEST, replace(REQUEST, request_id="q", prompt=(9,))]
    a = FakePool([[2, StreamLostError("gone")]])
    assert await run({"a": a}, plan("a"), requests) == TEXT
    assert [r.resumed_tokens for r in a.asked[1].requests] == [2, 2]


async def test_an_engine_that_gives_up_is_left() -> None:
    class GivesUp(FakePool):
        async def play(self, ask: RoutedRequest) -> AsyncGenerator[list[TokenDelta], None]:
            if not self.asked:
                self.asked.append(ask)
                yield [TokenDelta("r", 0, (1,), "one ", num_completion_tokens=1)]
                yield [TokenDelta("r", 0, (), "tw", finish_reason=FinishReason.ABORT)]
                return
            async for deltas in FakePool.play(self, ask):
                yield deltas

    assert await run({"a": GivesUp()}, plan("a")) == TEXT


async def test_a_fault_of_the_sequence_itself_is_not_tried_elsewhere() -> None:
    class Faulty(FakePool):
        async def play(self, ask: RoutedRequest) -> AsyncGenerator[list[TokenDelta], None]:
            self.asked.append(ask)
            yield [TokenDelta("r", 0, (1,), "one ", num_completion_tokens=1)]
            yield [TokenDelta("r", 0, (), "", finish_reason=FinishReason.FAULT, error="not finite")]

    a, b = Faulty(), FakePool()
    with pytest.raises(UnusableOutputError, match="not finite"):
        await run({"a": a, "b": b}, plan("a", "b"))
    assert len(a.asked) == 1 and not b.asked


async def test_leaving_closes_the_attempt() -> None:
    a = FakePool([[1, asyncio.Event()]])
    stream = Dispatcher({"a": a}, Clock()).generate(RoutedRequest((REQUEST,), True, HINTS), plan("a"))
    await anext(stream)
    await stream.aclose()
    assert a.closed == 1


async def test_retries_are_budgeted() -> None:
    """A whole destination failing does not double what the next one gets."""
    a, b = FakePool([[QueueFullError("x")]] * 1000), FakePool()
    d = Dispatcher({"a": a, "b": b}, Clock())
    refused = 0
    for _ in range(1000):
        try:
            await answer(d, plan("a", "b"))
        except QueueFullError:
            refused += 1
    assert 200 <= len(b.asked) <= 260 and refused == 1000 - len(b.asked)


async def test_hedging() -> None:
    a, b = FakePool([[asyncio.Event()]]), FakePool()
    assert await run({"a": a, "b": b}, plan("a", "b", hedge_after_s=0.001)) == TEXT
    assert a.closed == 1 and len(b.asked) == 1
    a = FakePool([[asyncio.Event()]])  # alone: its other replicas are asked
    assert await run({"a": a}, plan("a", hedge_after_s=0.001)) == TEXT
    assert len(a.asked) == 2 and a.closed == 2


async def test_shadows_get_a_copy_and_disturb_nobody() -> None:
    shadow = FakePool([[ValueError("boom")]])
    a = FakePool()
    assert await run({"a": a, "s": shadow}, plan("a", shadows=("s",))) == TEXT
    while not shadow.closed:
        await asyncio.sleep(0)
    [copy] = shadow.asked
    assert copy.requests[0].request_id == "r.shadow" and copy.requests[0].priority > a.asked[0].requests[0].priority


async def test_a_deadline_goes_to_the_engine_and_ends_the_search() -> None:
    clock = Clock()
    a, b = FakePool([[QueueFullError("x")]]), FakePool()
    d = Dispatcher({"a": a, "b": b}, clock)

    async def late() -> str:
        return await answer(d, plan("a", "b", deadline_s=5.0))

    original = a.begin

    async def slow(request: RoutedRequest) -> BegunStream:
        clock.now += 6.0
        return await original(request)

    a.begin = slow  # type: ignore[method-assign]
    with pytest.raises(QueueFullError):
        await late()
    assert a.asked[0].requests[0].deadline_s == 5.0 and not b.asked


# ------------------------------------------------------------------------------------------------------- upstreams


@asynccontextmanager
async def upstream(stand_in: StandIn, **settings: Any) -> AsyncIterator[UpstreamDestination]:
    async with stand_in.upstream(**settings) as client:
        yield UpstreamDestination(client)


GOOD = (said("one "), said("two"), said("", 0, "stop"), DONE)
BAD: dict[str, Callable[[], StandIn]] = {
    "500": lambda: StandIn([b"oops"], 500),
    "hang": lambda: StandIn(silent=asyncio.Event()),
    "slow": lambda: StandIn([asyncio.Event()]),
    "garbage": lambda: StandIn([event(b"{")]),
    "busy": lambda: StandIn([], 429, {"retry-after": "9", "content-type": "application/json"}),
}


@pytest.mark.sockets
async def test_answers_that_are_not_passed_on_trip_nothing() -> None:
    stand_in, clock = StandIn([said("x"), said("", 0, "tool_calls"), DONE]), Clock()
    async with upstream(stand_in) as up:
        d = Dispatcher({"up": up}, clock)
        for _ in range(10):
            with pytest.raises((UpstreamUnreadError, ReplicaLostError)):
                await answer(d, plan("up"))
        assert d.circuit_state("up") is State.CLOSED and len(stand_in.asked) == 10


@pytest.mark.sockets
@pytest.mark.parametrize("kind", BAD)
async def test_a_bad_upstream_falls_back_and_its_circuit_opens_and_recovers(kind: str) -> None:
    clock, stand_in, pool = Clock(), BAD[kind](), FakePool()
    async with upstream(stand_in, first_token_s=SOON_S) as up:
        d = Dispatcher({"up": up, "pool": pool}, clock)
        for _ in range(20):
            assert await answer(d, plan("up", "pool")) == TEXT
            clock.now += 0.01
        assert len(stand_in.asked) == 3  # then nobody waits for it any more
        assert d.circuit_state("up") is State.OPEN
        stand_in.items, stand_in.status, stand_in.silent = GOOD, 200, None
        stand_in.headers = EVENT_STREAM
        clock.now += 1.0
        assert await answer(d, plan("up", "pool")) == "one two"
        assert d.circuit_state("up") is State.CLOSED


@pytest.mark.sockets
@pytest.mark.parametrize("kind", BAD)
async def test_a_bad_upstream_alone_is_unavailable(kind: str) -> None:
    async with upstream(BAD[kind](), first_token_s=SOON_S) as up:
        with pytest.raises((ModelUnavailableError, OverloadedError)) as refused:
            await run({"up": up}, plan("up"))
    assert refused.value.retry_after_s == (9.0 if kind == "busy" else 5.0)


@pytest.mark.sockets
@pytest.mark.slow
async def test_our_own_bound_on_connections_trips_nothing() -> None:
    stand_in, pool = StandIn([said("one "), asyncio.Event()]), FakePool()
    async with upstream(stand_in, max_connections=1) as up:
        d = Dispatcher({"up": up, "pool": pool}, Clock())
        held = d.generate(RoutedRequest((REQUEST,), True, HINTS), plan("up"))
        await anext(held)
        for _ in range(10):
            assert await answer(d, plan("up", "pool", first_token_s=0.001)) == TEXT
        with pytest.raises(OverloadedError):
            await answer(d, plan("up", first_token_s=0.001))
        await held.aclose()
        assert d.circuit_state("up") is State.CLOSED


@pytest.mark.sockets
async def test_an_upstream_cut_in_the_middle_is_a_clean_error_and_asks_nobody_else() -> None:
    pool = FakePool()
    seen = []
    async with upstream(StandIn([said("one ")])) as up:
        d = Dispatcher({"up": up, "pool": pool}, Clock())
        with pytest.raises(ReplicaLostError):
            async for deltas in d.generate(RoutedRequest((REQUEST,), True, HINTS), plan("up", "pool")):
                seen += deltas
    assert [d.text for d in seen] == ["one "] and not pool.asked


@pytest.mark.sockets
async def test_refused_content_falls_back_nowhere_and_trips_nothing() -> None:
    body = b'{"error": {"message": "not this", "code": "content_filter", "param": "messages"}}'
    stand_in, pool = StandIn([body], 400), FakePool()
    async with upstream(stand_in) as up:
        d = Dispatcher({"up": up, "pool": pool}, Clock())
        for _ in range(10):
            with pytest.raises(UpstreamRefusedError) as refused:
                await answer(d, plan("up", "pool"))
            assert (str(refused.value), refused.value.param, refused.value.code) == (
                "not this",
                "messages",
                "content_filter",
            )
    assert not pool.asked and len(stand_in.asked) == 10


@pytest.mark.sockets
async def test_a_prompt_too_long_for_an_upstream_goes_to_a_bigger_pool() -> None:
    body = b'{"error": {"message": "too long", "code": "context_length_exceeded"}}'
    async with upstream(StandIn([body], 400)) as up:
        assert await run({"up": up, "pool": FakePool()}, plan("up", "pool")) == TEXT


@pytest.mark.sockets
async def test_a_pool_falls_back_to_an_upstream() -> None:
    stand_in = StandIn(GOOD)
    async with upstream(stand_in) as up:
        assert await run({"a": FakePool(up=False), "up": up}, plan("a", "up")) == "one two"
    assert stand_in.asked[0][2]["max_tokens"] == 4

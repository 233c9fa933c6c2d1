"""A pool at rest: several requests wake it once, wait for it, give up, hear that it cannot start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers_routing import BegunStream
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.api.errors import from_exception
from deployments.config.routing_table import Limits
from deployments.routing import cold_start as cold_start_module
from deployments.routing.cold_start import ColdStart
from deployments.routing.destinations import RoutedRequest
from deployments.routing.dispatch import Dispatcher
from deployments.routing.errors import ModelStartError, ModelUnavailableError, OverloadedError
from deployments.routing.hints import RoutingHints
from deployments.routing.plan import RoutePlan
from engine.types import FinishReason, GenerateRequest, SamplingParams, TokenDelta

NOBODY = DeploymentUnavailableError(DeploymentID("pool", "app"))
REQUEST = GenerateRequest("r", (1, 2), SamplingParams(max_tokens=1))


class Call:
    """To a replica: waits until there is one."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def __await__(self) -> Generator[Any, None, Any]:
        yield from self.handle.replica.wait().__await__()
        if self.handle.fault is not None:
            raise self.handle.fault


@dataclass
class Handle:
    """A pool's handle. `replica`: Serve has started one. `fault`: what a call then raises."""

    replica: asyncio.Event = field(default_factory=asyncio.Event)
    fault: Exception | None = None
    calls: list[Call] = field(default_factory=list)

    @property
    def state(self) -> Handle:
        return self

    def remote(self) -> Call:
        self.calls.append(Call(self))
        return self.calls[-1]

    @property
    def open(self) -> int:
        return sum(not call.cancelled for call in self.calls)


@dataclass
class Bench:
    handle: Handle = field(default_factory=Handle)
    trouble: str | None = None
    asked: int = 0
    now_s: float = 0.0

    async def look(self) -> str | None:
        self.asked += 1
        return self.trouble

    def cold(self, timeout_s: float = 60.0, most: int = 9) -> ColdStart:
        handle: Any = self.handle
        return ColdStart("pool", handle, self.look, timeout_s, most, lambda: self.now_s)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(cold_start_module, "_CALL_S", 0.01)
    monkeypatch.setattr(cold_start_module, "_LOOK_S", 0.001)
    return Bench()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_several_requests_wake_it_once(bench: Bench) -> None:
    cold = bench.cold()
    waiting = [asyncio.create_task(cold.wait()) for _ in range(5)]
    await until(lambda: bench.asked > 2)
    assert cold.starting and bench.handle.open <= 1 and not any(task.done() for task in waiting)
    bench.handle.replica.set()
    await cold.answered(60)
    assert not any(task.done() for task in waiting)  # it is not connected yet
    bench.now_s = 7.0
    cold.up()
    await asyncio.gather(*waiting)
    await until(lambda: bench.handle.open == 0)
    assert not cold.starting and cold.retry_after_s == 7.0


async def test_waiting_ends_with_how_long_it_will_still_take(bench: Bench) -> None:
    cold = bench.cold(timeout_s=0.5)  # long enough to be seen waiting on a busy machine
    cold.said(12.0)
    task = asyncio.create_task(cold.wait())
    await until(lambda: cold.starting)
    bench.now_s = 4.0
    with pytest.raises(ModelUnavailableError) as caught:
        await task
    assert caught.value.retry_after_s == 8.0
    bench.now_s = 40.0
    assert 0 < cold.retry_after_s < 12.0  # later than ever before: nobody knows
    with pytest.raises(ModelUnavailableError):
        await cold.wait(waited_s=0.5)
    with pytest.raises(ModelUnavailableError):
        await bench.cold().wait(within_s=0.0)


async def test_a_request_that_gives_up_leaves_nothing(bench: Bench) -> None:
    cold = bench.cold()
    task = asyncio.create_task(cold.wait())
    await until(lambda: bench.handle.open == 1)
    task.cancel()
    await until(lambda: not cold.starting)
    assert bench.handle.open == 0 and not cold.failing
    assert len(bench.handle.calls) <= 2  # Serve has seen the first one
    bench.now_s = 3.0  # the replica still starts, and comes up
    cold.up()
    assert cold.retry_after_s == 3.0


async def test_replicas_that_fail_end_the_waiting(bench: Bench) -> None:
    cold = bench.cold()
    waiting = [asyncio.create_task(cold.wait()) for _ in range(3)]
    await until(lambda: bench.handle.open == 1)
    bench.trouble = "it failed to start"
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, ModelStartError)
        told = from_exception(outcome)
        assert told is not None and (told.status, told.code) == (503, "model_start_failed")
        assert int(told.headers["retry-after"]) > 0
    assert cold.failing and not cold.starting and bench.handle.open == 0
    await cold.look()  # no sooner than after some seconds
    assert cold.failing
    bench.now_s, bench.trouble = 60.0, None
    await cold.look()
    assert not cold.failing


@pytest.mark.parametrize("fault", [NOBODY, RuntimeError("what Serve never says")], ids=repr)
async def test_a_pool_that_serve_has_given_up(bench: Bench, fault: Exception) -> None:
    bench.handle.fault = fault
    bench.handle.replica.set()
    cold = bench.cold()
    with pytest.raises(ModelStartError):
        await cold.wait()
    assert cold.failing and not cold.starting
    cold.up()
    assert not cold.failing


async def test_a_replica_that_dies_as_it_answers_is_not_the_end(bench: Bench) -> None:
    bench.handle.fault = RayActorError()
    bench.handle.replica.set()
    cold = bench.cold()
    task = asyncio.create_task(cold.wait())
    await until(lambda: len(bench.handle.calls) > 2)
    bench.handle.fault = None
    cold.up()
    await task


async def test_no_more_wait_than_one_replica_takes(bench: Bench) -> None:
    cold = bench.cold(most=1)
    task = asyncio.create_task(cold.wait())
    await until(lambda: cold.starting)
    with pytest.raises(OverloadedError):
        await cold.wait()
    cold.up()
    await task


@dataclass
class Destination:
    """`leaves`: the replica is just being taken out when the request comes."""

    cold: ColdStart | None = None
    up: bool = False
    leaves: bool = False
    weights: str | None = "w"
    may_recover: bool = False
    successor_expected: bool = False
    asked: int = 0

    @property
    def cold_start(self) -> ColdStart | None:
        return None if self.up else self.cold

    def may_have(self, weights: str) -> bool:
        return self.weights == weights

    def up_with(self, weights: str) -> bool:
        return self.up and self.weights == weights

    def suspects(self, error: Exception) -> bool:
        return False

    async def begin(self, request: RoutedRequest) -> BegunStream:
        return await BegunStream.of(self.play(request))

    async def play(self, ask: RoutedRequest) -> AsyncGenerator[list[TokenDelta], None]:
        self.asked += 1
        if self.leaves:
            self.leaves = self.up = False
            raise ModelUnavailableError(5.0)
        yield [TokenDelta(r.request_id, 0, (1,), "one", finish_reason=FinishReason.LENGTH) for r in ask.requests]


async def answer(destinations: dict[str, Any], *names: str, **limits: Any) -> str:
    dispatcher = Dispatcher(destinations, lambda: 0.0)
    stream = dispatcher.generate(
        RoutedRequest((REQUEST,), True, RoutingHints()), RoutePlan(names, limits=Limits(**limits))
    )
    return "".join([delta.text async for deltas in stream for delta in deltas])


async def test_a_request_waits_for_the_first_replica(bench: Bench) -> None:
    destination = Destination(bench.cold())
    task = asyncio.create_task(answer({"a": destination}, "a"))
    await until(lambda: bench.handle.open == 1)
    assert not destination.asked
    destination.up = True
    assert destination.cold is not None
    destination.cold.up()
    assert await task == "one" and destination.asked == 1


async def test_a_request_in_the_moment_in_which_the_last_replica_leaves(bench: Bench) -> None:
    destination = Destination(bench.cold(), up=True, leaves=True)
    task = asyncio.create_task(answer({"a": destination}, "a"))
    await until(lambda: bench.handle.open == 1)
    destination.up = True
    assert destination.cold is not None
    destination.cold.up()
    assert await task == "one" and destination.asked == 2


async def test_who_is_up_serves_while_the_first_choice_wakes(bench: Bench) -> None:
    destinations = {"a": Destination(bench.cold()), "b": Destination(up=True), "c": Destination(bench.cold())}
    assert await answer(destinations, "a", "b", "c") == "one"
    a, c = destinations["a"].cold, destinations["c"].cold
    assert a is not None and a.starting and c is not None and not c.starting
    assert await answer(destinations, "b", "c") == "one" and not c.starting
    a.up()


async def test_the_second_choice_when_the_first_cannot_start(bench: Bench) -> None:
    other = Bench()
    bench.trouble = "it failed to start"
    destinations = {"a": Destination(bench.cold()), "b": Destination(other.cold())}
    task = asyncio.create_task(answer(destinations, "a", "b"))
    await until(lambda: other.handle.open == 1)
    destinations["b"].up = True
    second = destinations["b"].cold
    assert second is not None
    second.up()
    assert await task == "one" and not destinations["a"].asked


async def test_a_deadline_bounds_the_waiting(bench: Bench) -> None:
    with pytest.raises(ModelUnavailableError):
        await answer({"a": Destination(bench.cold())}, "a", deadline_s=0.01)

"""The gateway's backend against handles that behave like Serve's on a bad day."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from helpers_gateway import demo_text
from ray import ActorID
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.gateway import pool as pool_module
from deployments.gateway import serve_backend
from deployments.gateway.backend import ServedModel
from deployments.gateway.errors import ModelUnavailableError, ReplicaLostError
from deployments.gateway.serve_backend import ServeBackend
from deployments.replica_info import ReplicaInfo
from deployments.router.plan import RoutePlan
from deployments.wire import pack
from engine.errors import ContextLengthError, EngineDeadError, QueueFullError
from engine.types import FinishReason, GenerateRequest, SamplingParams, TokenDelta

INFO = ReplicaInfo(512, "fp_a")
DEAD = ActorUnavailableError("gone", ActorID.nil().binary())
NOBODY = DeploymentUnavailableError(DeploymentID("pool", "app"))
REQUEST = GenerateRequest("r", (1, 2), SamplingParams(max_tokens=2))

Step = list[TokenDelta] | BaseException | Awaitable[Any]


def token(n: int, last: bool = False, index: int = 0) -> list[TokenDelta]:
    return [TokenDelta("r", index, (n,), str(n), finish_reason=FinishReason.LENGTH if last else None)]


GOOD: list[Step] = [token(1), token(2, last=True)]


class Stream:
    """What handle.remote() gives for a generator: plays `steps`; an awaitable among them is waited for."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = list(steps)
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[Any]:
        while self.steps:
            step = self.steps.pop(0)
            if isinstance(step, list):
                return pack(step)
            if isinstance(step, BaseException):
                raise step
            await step
        raise StopAsyncIteration


@dataclass
class Handle:
    """A pool's handle. Each call takes the next script of `calls`; describe gives `describe()`."""

    calls: list[list[Step]] = field(default_factory=list)
    describe: Callable[[], list[Any]] = lambda: [INFO]
    streams: list[Stream] = field(default_factory=list)
    asked: int = 0

    def options(self, **how: Any) -> Handle:
        assert how.items() >= {"stream": True, "method_name": "generate"}.items()
        return self

    def remote(self, requests: tuple[GenerateRequest, ...]) -> Stream:
        self.streams.append(Stream(self.calls.pop(0)))
        return self.streams[-1]

    def broadcast(self, method: str) -> Handle:
        assert method == "describe"
        self.asked += 1
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions and timeout_s > 0
        answers = self.describe()
        if answers == []:
            raise NOBODY
        return answers


class Call:
    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def __await__(self) -> Generator[Any, None, Any]:
        if self.answer is None:
            yield from asyncio.Event().wait().__await__()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Router:
    """Its handle. `answer` None: no answer ever comes."""

    def __init__(self, *candidates: str) -> None:
        self.answer: Any = RoutePlan(candidates, 0)
        self.made: list[Call] = []

    @property
    def plan(self) -> Router:
        return self

    def remote(self, request: Any) -> Call:
        self.made.append(Call(self.answer))
        return self.made[-1]


@asynccontextmanager
async def backend(router: Router | None = None, **pools: Handle) -> AsyncIterator[ServeBackend]:
    models = {name: ServedModel(name, 0, "tests", 0, demo_text()) for name in pools}
    tasks = asyncio.all_tasks()
    made = ServeBackend(models, router or Router(*pools), pools, Handle())  # type: ignore[arg-type]
    try:
        await settled(lambda: all(handle.asked for handle in pools.values()))
        yield made
    finally:
        for task in asyncio.all_tasks() - tasks:
            task.cancel()


async def settled(condition: Callable[[], bool]) -> None:
    """Some turns of the event loop, until the condition holds; fails when it never will."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def run(b: ServeBackend, request: GenerateRequest = REQUEST, model: str = "a") -> list[int]:
    return [t async for deltas in b.generate(model, (request,)) for d in deltas for t in d.token_ids]


@pytest.fixture(autouse=True)
def quick_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_POLL_S", 0.002)


async def test_a_request_that_goes_well() -> None:
    handle = Handle([GOOD])
    async with backend(a=handle) as b:
        await settled(lambda: b.models()["a"].max_model_len == 512)
        assert b.models()["a"].fingerprint == "fp_a"
        assert await b.ready()
        assert await run(b) == [1, 2]
        assert len(handle.streams) == 1 and handle.streams[0].cancelled


def rpc_error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "details")


LOSSES = [
    ActorDiedError(),
    DEAD,
    rpc_error(grpc.StatusCode.CANCELLED),
    rpc_error(grpc.StatusCode.INTERNAL),
    NOBODY,
    EngineDeadError("stopped"),
    RayTaskError("generate", "trace", EngineDeadError("stopped")).as_instanceof_cause(),
    asyncio.CancelledError(),
]


@pytest.mark.parametrize("loss", [*LOSSES, None], ids=repr)
async def test_a_replica_lost_before_the_first_token_is_replaced_by_another(loss: BaseException | None) -> None:
    first: list[Step] = [] if loss is None else [loss]  # None: a stream that ends without a word
    handle = Handle([first, GOOD])
    async with backend(a=handle) as b:
        assert await run(b) == [1, 2]
    assert [s.cancelled for s in handle.streams] == [True, True]


@pytest.mark.parametrize("loss", [*LOSSES, None], ids=repr)
async def test_a_replica_lost_later_ends_the_request_with_an_error(loss: BaseException | None) -> None:
    handle = Handle([[token(1), *([] if loss is None else [loss])], GOOD])
    seen: list[TokenDelta] = []
    async with backend(a=handle) as b:
        with pytest.raises(ReplicaLostError):
            async for deltas in b.generate("a", (REQUEST,)):
                seen += deltas
    assert [d.token_ids for d in seen] == [(1,)]
    assert len(handle.streams) == 1 and handle.streams[0].cancelled


async def test_a_stream_that_leaves_a_choice_open_is_a_lost_one() -> None:
    two = GenerateRequest("r", (1,), SamplingParams(n=2))
    async with backend(a=Handle([[token(1, last=True, index=1)]])) as b:
        with pytest.raises(ReplicaLostError):
            await run(b, two)


async def test_losses_in_a_row_end_in_unavailable() -> None:
    handle = Handle([[DEAD]] * 9)
    async with backend(a=handle) as b:
        with pytest.raises(ModelUnavailableError):
            await run(b)
    assert len(handle.streams) == serve_backend._ATTEMPTS


async def test_no_replicas_is_an_answer_at_once_and_no_call_waits_for_one() -> None:
    handle = Handle([GOOD], describe=list)
    async with backend(a=handle) as b:
        assert not await b.ready()
        with pytest.raises(ModelUnavailableError):
            await run(b)
        assert handle.streams == []
        handle.describe = lambda: [DEAD, INFO]  # one of two is enough
        await settled(lambda: b.models()["a"].max_model_len == 512)
        assert await b.ready()
        assert await run(b) == [1, 2]


@pytest.mark.parametrize("answers", [[], [DEAD], [DEAD, EngineDeadError("x")]], ids=repr)
async def test_waiting_requests_are_released_when_the_pool_goes_down(answers: list[Any]) -> None:
    """Serve would hold them until a new replica has loaded its model."""
    handle = Handle([[asyncio.Event().wait()]])
    async with backend(a=handle) as b:
        task = asyncio.create_task(run(b))
        await settled(lambda: len(handle.streams) == 1)
        handle.describe = lambda: answers
        with pytest.raises(ModelUnavailableError) as refused:
            await task
        assert refused.value.retry_after_s > 0
        assert handle.streams[0].cancelled
        assert not await b.ready()


async def test_a_slow_first_token_is_waited_for() -> None:
    go = asyncio.Event()
    handle = Handle([[go.wait(), *GOOD]])
    async with backend(a=handle) as b:
        task = asyncio.create_task(run(b))
        asked = handle.asked
        await settled(lambda: handle.asked > asked + 3)
        assert not task.done()
        go.set()
        assert await task == [1, 2]


async def test_the_next_pool_serves_when_the_first_is_down_lost_or_full() -> None:
    a, b_ = Handle(describe=list), Handle([GOOD, GOOD, GOOD, GOOD])
    async with backend(Router("a", "b"), a=a, b=b_) as b:
        await settled(lambda: b.models()["b"].max_model_len > 0)
        assert await run(b) == [1, 2]
        a.describe = lambda: [INFO]
        await settled(lambda: b.models()["a"].max_model_len > 0)
        for failure in (DEAD, BackPressureError(1, 1), QueueFullError("full")):
            a.calls = [[failure], [failure], [failure]]
            assert await run(b) == [1, 2]
    assert len(b_.streams) == 4


@pytest.mark.parametrize("full", [BackPressureError(1, 1), QueueFullError("full")], ids=repr)
async def test_full_everywhere_is_said_so(full: Exception) -> None:
    async with backend(Router("a", "b"), a=Handle([[full]]), b=Handle([[full]])) as b:
        with pytest.raises(QueueFullError):
            await run(b)


@pytest.mark.parametrize("wrapped", [False, True])
async def test_the_engines_own_refusal_arrives_as_it_was_raised(wrapped: bool) -> None:
    refusal: Exception = ContextLengthError("too long by 3", "prompt")
    if wrapped:
        refusal = RayTaskError("generate", "Traceback ...", refusal).as_instanceof_cause()
    handle = Handle([[refusal]])
    async with backend(a=handle) as b:
        with pytest.raises(ContextLengthError) as error:
            await run(b)
        assert await b.ready()
    assert str(error.value) == "too long by 3" and error.value.param == "prompt"
    assert len(handle.streams) == 1 and handle.streams[0].cancelled


async def test_a_fault_nobody_foresaw_is_not_retried() -> None:
    handle = Handle([[KeyError("bug")], GOOD])
    async with backend(a=handle) as b:
        with pytest.raises(KeyError):
            await run(b)
    assert len(handle.streams) == 1 and handle.streams[0].cancelled


@pytest.mark.parametrize("before", [[], [token(1)]], ids=["queued", "streaming"])
async def test_cancelling_the_caller_cancels_the_call(before: list[Step]) -> None:
    handle = Handle([[*before, asyncio.Event().wait()]])
    async with backend(a=handle) as b:
        task = asyncio.create_task(run(b))
        await settled(lambda: bool(handle.streams) and not handle.streams[0].steps)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert handle.streams[0].cancelled


async def test_leaving_the_iterator_cancels_the_call() -> None:
    handle = Handle([GOOD])
    async with backend(a=handle) as b:
        stream = b.generate("a", (REQUEST,))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
    assert handle.streams[0].cancelled


async def test_cancelling_the_caller_while_the_router_thinks() -> None:
    router = Router("a")
    async with backend(router, a=Handle()) as b:
        await settled(b._plans.__len__)
        router.answer = None
        before = len(router.made)
        task = asyncio.create_task(run(b))
        await settled(lambda: len(router.made) > before)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert router.made[-1].cancelled


@pytest.mark.parametrize("trouble", [DEAD, NOBODY, rpc_error(grpc.StatusCode.UNAVAILABLE), None], ids=repr)
async def test_a_router_in_trouble_is_replaced_by_its_last_plan(
    trouble: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_backend, "_PLAN_TIMEOUT_S", 0.01)
    router = Router("a")
    plan, router.answer = router.answer, trouble
    async with backend(router, a=Handle([GOOD])) as b:
        assert not await b.ready()  # the pool is up, but nobody can say that it serves this model
        with pytest.raises(ModelUnavailableError):
            await run(b)
        router.answer = plan
        await settled(b._plans.__len__)
        assert await b.ready()
        router.answer = trouble
        assert await run(b) == [1, 2]
    assert all(call.cancelled for call in router.made)


async def test_simultaneous_losses_ask_the_replicas_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_POLL_S", 1e9)
    go = asyncio.Event()
    handle = Handle([[go.wait(), DEAD] for _ in range(50)])
    async with backend(a=handle) as b:
        await settled(lambda: b.models()["a"].max_model_len > 0)
        tasks = [asyncio.create_task(run(b)) for _ in range(50)]
        await settled(lambda: len(handle.streams) == 50)
        handle.describe = lambda: [DEAD]
        asked = handle.asked
        go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(r) for r in results} == {ModelUnavailableError}
    assert handle.asked <= asked + 2


@pytest.mark.parametrize(("valid_s", "asked"), [(0.0, 4), (60.0, 1)])
async def test_a_plan_is_asked_for_again_when_it_is_no_longer_valid(valid_s: float, asked: int) -> None:
    router = Router("a")
    router.answer = RoutePlan(("a",), 0, valid_s=valid_s)
    async with backend(router, a=Handle([GOOD] * 3)) as b:
        await settled(lambda: len(router.made) == 1)  # the backend's own, to know that it is ready
        for _ in range(3):
            assert await run(b) == [1, 2]
    assert len(router.made) == asked

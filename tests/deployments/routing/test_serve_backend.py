"""The gateway's backend over replicas that have bad days."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
from helpers_gateway import demo_text
from helpers_routing import Results
from prometheus_client.metrics_core import Metric
from ray import ActorID
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.channel.errors import ReplicaFaultError, StreamLostError
from deployments.channel.replica_info import Address, Load, ReplicaInfo, ReplicaStatus
from deployments.config.application import ModelConfig
from deployments.config.routing import RoutingConfig, compiled
from deployments.routing import pool as pool_module
from deployments.routing import table_feed
from deployments.routing.errors import (
    ModelUnavailableError,
    RepeatedLossError,
    ReplicaLostError,
    UnableError,
    UnknownModelError,
)
from deployments.routing.hints import RoutingHints
from deployments.routing.pool_destination import MAX_TRIES
from deployments.routing.serve_backend import GraphHandles, ServeBackend
from deployments.routing.served_model import ServedModel
from engine.config import EngineConfig
from engine.errors import ContextLengthError, EngineDeadError, QueueFullError
from engine.types import FinishReason, GenerateRequest, SamplingParams, TokenDelta

DEAD = ActorUnavailableError("gone", ActorID.nil().binary())
NOBODY = DeploymentUnavailableError(DeploymentID("pool", "app"))
REQUEST = GenerateRequest("r", (1, 2), SamplingParams(max_tokens=2))

Step = list[TokenDelta] | BaseException | Awaitable[Any]


def token(n: int, last: bool = False, index: int = 0) -> list[TokenDelta]:
    return [TokenDelta("r", index, (n,), str(n), finish_reason=FinishReason.LENGTH if last else None)]


def info(name: str, length: int = 512) -> ReplicaInfo:
    return ReplicaInfo(length, "fp_a", Address(name, "127.0.0.1", 1, b"secret"))


GOOD: list[Step] = [token(1), token(2, last=True)]


class Stream:
    """What a replica gives for a request: plays `steps`; an awaitable among them is waited for."""

    def __init__(self, steps: list[Step], weights: str) -> None:
        self.steps = list(steps)
        self.closed = False
        self.accepted = True
        self.weights = weights
        self.first: list[TokenDelta] | None = None

    def close(self) -> None:
        self.closed = True

    async def begin(self) -> None:
        self.first = await anext(self)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[TokenDelta]:
        if self.first is not None:
            first, self.first = self.first, None
            return first
        while self.steps:
            step = self.steps.pop(0)
            if isinstance(step, list):
                return step
            if isinstance(step, BaseException):
                raise step
            await step
        raise StopAsyncIteration


@dataclass
class Replica:
    """Stands in for the connection to a replica. Each call takes the next script of `calls`."""

    address: Address
    calls: list[list[Step]] = field(default_factory=list)
    usable: bool = True
    status: ReplicaStatus = ReplicaStatus.ACTIVE
    load: Load = field(default_factory=Load)
    num_streams: int = 0
    queued_tokens: int = 0
    streams: list[Stream] = field(default_factory=list)
    streamed: list[bool] = field(default_factory=list)
    connected: int = 0
    retired: int = 0
    weights: str = "fp_a"

    def open(self, requests: tuple[GenerateRequest, ...], streamed: bool, new_tokens: int) -> Stream:
        self.streams.append(Stream(self.calls.pop(0), self.weights))
        self.streamed.append(streamed)
        return self.streams[-1]

    def retire(self) -> None:
        self.retired += 1

    def close(self) -> None:
        self.usable = False


class Replicas(dict[str, Replica]):
    """By id; made when first asked for."""

    def __missing__(self, name: str) -> Replica:
        self[name] = Replica(info(name).address)
        return self[name]

    def connect(self, address: Address, *rest: object) -> Replica:
        self[address.replica_id].connected += 1
        self[address.replica_id].weights = str(rest[-1])
        return self[address.replica_id]


@pytest.fixture(autouse=True)
def replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replicas]:
    made = Replicas()
    monkeypatch.setattr(pool_module, "ChannelClient", made.connect)
    yield made


@dataclass
class Handle:
    """A pool's handle: what its replicas say to describe() and metric_families()."""

    describe: Callable[[], Any]
    metrics: Callable[[], Any] = list
    asked: int = 0

    def broadcast(self, method: str) -> Results:
        if method == "metric_families":
            return Results(Handle(self.metrics).answers)
        assert method == "describe"
        self.asked += 1
        return Results(self.answers)

    async def answers(self) -> list[Any]:
        answers = self.describe()
        if answers == []:
            raise NOBODY
        if isinstance(answers, BaseException):
            raise answers
        return answers


def one(name: str = "a") -> Handle:
    return Handle(lambda: [info(name)])


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
    """Its handle. `answer` None: no answer ever comes. Each pool is a model; `others` stand behind all of them."""

    def __init__(self, pools: Collection[str], *others: str) -> None:
        routes = {"routes": {name: {"pools": [name], "fallbacks": others} for name in pools}}
        self.answer: Any = compiled(RoutingConfig.model_validate(routes), pools, (), {"default": 0})
        self.made: list[Call] = []

    @property
    def table(self) -> Router:
        return self

    def remote(self, known: str) -> Call:
        self.made.append(Call(self.answer))
        return self.made[-1]


@asynccontextmanager
async def backend(
    router: Router | None = None,
    gateways: Handle | None = None,
    on_usable: Callable[[str, int], None] = lambda pool, replicas: None,
    **pools: Handle,
) -> AsyncIterator[ServeBackend]:
    models = {name: ServedModel(name, 0, "tests", 0, demo_text()) for name in pools}
    configs = [ModelConfig(name=name, engine=EngineConfig("none"), routing_policy="round_robin") for name in pools]
    router = router or Router(pools)
    tasks = asyncio.all_tasks()
    made = ServeBackend(  # type: ignore[arg-type]
        models, configs, (), GraphHandles(router, pools, gateways or Handle(list)), on_usable=on_usable, poll_s=0.002
    )
    try:
        await settled(lambda: all(handle.asked > 1 for handle in pools.values()) and len(router.made) > 1)
        yield made
    finally:
        await made.close()
        await settled(lambda: asyncio.all_tasks() <= tasks)


async def settled(condition: Callable[[], bool]) -> None:
    """Some turns of the event loop, until the condition holds; fails when it never will."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def run(b: ServeBackend, request: GenerateRequest = REQUEST, model: str = "a") -> list[int]:
    return [
        t async for deltas in b.generate(model, (request,), True, RoutingHints()) for d in deltas for t in d.token_ids
    ]


async def take_turn(b: ServeBackend, replicas: Replicas, name: str) -> None:
    """Has the replica serve a request, so that it is the others' turn."""
    others = [replica for other, replica in replicas.items() if other != name]
    for replica in others:
        replica.usable = False
    replicas[name].calls.insert(0, GOOD)
    assert await run(b) == [1, 2]
    replicas[name].streams.clear()
    for replica in others:
        replica.usable = True


def rpc_error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "details")


async def test_a_gateway_gets_acquainted_before_its_first_request(replicas: Replicas) -> None:
    async with backend(a=one(), b=Handle(list)) as b:
        await b.acquaint(60)
        assert not await b.ready()  # which is another question
        replicas["a"].connected = 0
        async with asyncio.timeout(60):
            await b.acquaint(0.01)  # but not for ever
            replicas["a"].connected = 1
            await b.acquaint(60)


async def test_how_many_replicas_would_take_a_request_is_told(replicas: Replicas) -> None:
    told: list[tuple[str, int]] = []
    names = ["x", "y"]
    handle = Handle(lambda: [info(name) for name in names])
    async with backend(on_usable=lambda pool, usable: told.append((pool, usable)), a=handle):
        await settled(lambda: told[-1] == ("a", 2))
        replicas["x"].usable = False
        await settled(lambda: told[-1] == ("a", 1))
        names.remove("y")
        await settled(lambda: told[-1] == ("a", 0))


async def test_metrics_of_a_process_that_fails_are_left_out_alone(replicas: Replicas) -> None:
    good = Metric("alive", "", "gauge")
    good.add_sample("alive", {}, 1.0)
    a = Handle(lambda: [info("a")], metrics=lambda: [DEAD, [good]])
    async with backend(gateways=Handle(list, metrics=lambda: TimeoutError("too busy")), a=a) as b:
        assert b"alive 1.0" in (await b.metrics() or b"")


async def test_a_pool_that_was_taken_out_of_rotation_is_not_waited_for(replicas: Replicas) -> None:
    async with backend(a=one(), b=Handle(lambda: [info("b")])) as b:
        await settled(lambda: len(replicas) == 2)
        assert await b.ready()
        replicas["b"].usable, replicas["b"].status = False, ReplicaStatus.DRAINED
        assert await b.ready()
        replicas["b"].status = ReplicaStatus.LEAVING
        assert not await b.ready()
        for name in "ab":
            replicas[name].usable, replicas[name].status = False, ReplicaStatus.DRAINED
        assert not await b.ready()


async def test_a_request_that_goes_well(replicas: Replicas) -> None:
    replicas["a"].calls = [GOOD, GOOD]
    async with backend(a=one()) as b:
        assert b.models()["a"].max_model_len == 512 and b.models()["a"].fingerprint == "fp_a"
        assert await b.ready()
        assert await run(b) == [1, 2]
        async for _ in b.generate("a", (REQUEST,), False, RoutingHints()):
            pass
    assert replicas["a"].streamed == [True, False]
    assert [s.closed for s in replicas["a"].streams] == [True, True]
    assert replicas["a"].connected == 1


LOSSES = [StreamLostError("gone"), EngineDeadError("stopped")]


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
async def test_a_replica_lost_before_the_first_token_is_replaced_by_another(
    replicas: Replicas, loss: BaseException
) -> None:
    replicas["a"].calls, replicas["b"].calls = [[loss]], [GOOD]
    async with backend(a=Handle(lambda: [info("a"), info("b")])) as b:
        await take_turn(b, replicas, "b")
        assert await run(b) == [1, 2]
    assert [s.closed for name in "ab" for s in replicas[name].streams] == [True, True]


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
async def test_replicas_lost_later_one_after_the_other_end_it_with_an_error(
    replicas: Replicas, loss: BaseException
) -> None:
    replicas["a"].calls, replicas["b"].calls = [[token(1), loss]], [[loss]]
    seen: list[TokenDelta] = []
    async with backend(a=Handle(lambda: [info("a"), info("b")])) as b:
        await take_turn(b, replicas, "b")
        replicas["a"].calls.append([loss])
        with pytest.raises(RepeatedLossError):
            async for deltas in b.generate("a", (REQUEST,), True, RoutingHints()):
                seen += deltas
    assert [d.token_ids for d in seen] == [(1,)]
    assert all(s.closed for name in "ab" for s in replicas[name].streams)


async def test_full_replicas_in_a_row_are_an_overload(replicas: Replicas) -> None:
    names = "abcde"
    for name in names:
        replicas[name].calls = [[QueueFullError("full")]]
    async with backend(a=Handle(lambda: [info(name) for name in names])) as b:
        with pytest.raises(QueueFullError):
            await run(b)
    assert sum(len(replicas[name].streams) for name in names) == MAX_TRIES


@pytest.mark.parametrize("before", [[], [token(1)]], ids=["before the first token", "after it"])
async def test_a_request_that_kills_its_replica_kills_no_third(replicas: Replicas, before: list[Step]) -> None:
    names = "abcdefgh"
    for name in names:
        replicas[name].calls = [[*before, StreamLostError("gone")]]
    async with backend(a=Handle(lambda: [info(name) for name in names])) as b:
        with pytest.raises(RepeatedLossError):
            await run(b)
    assert sum(len(replicas[name].streams) for name in names) == 2


async def test_replicas_that_were_lost_before_they_had_the_request_do_not_count(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a node with all of them is lost: the client may ask again."""
    monkeypatch.setattr(Stream, "accepted", property(lambda _: False, lambda *_: None), raising=False)
    names = "abcdefgh"
    for name in names:
        replicas[name].calls = [[StreamLostError("gone")]]
    async with backend(a=Handle(lambda: [info(name) for name in names])) as b:
        with pytest.raises(ModelUnavailableError):
            await run(b)
    assert sum(len(replicas[name].streams) for name in names) == MAX_TRIES


async def test_an_answer_goes_on_only_with_the_weights_that_began_it(replicas: Replicas) -> None:
    """In the middle of a rolling update: one replica of the old weights, one of the new."""
    old, new = info("a"), replace(info("b"), fingerprint="fp_new")
    replicas["a"].calls, replicas["b"].calls = [[token(1), StreamLostError("gone")]], []
    running = [old, new]
    async with backend(a=Handle(lambda: list(running))) as b:
        await take_turn(b, replicas, "b")
        with pytest.raises(ReplicaLostError):
            async for _ in b.generate("a", (REQUEST,), True, RoutingHints()):
                replicas["a"].usable = False
                running.remove(old)
    assert not replicas["b"].streams


async def test_an_answer_goes_on_with_a_replica_of_its_weights_whatever_the_pool_says_first(
    replicas: Replicas,
) -> None:
    new, old, other = replace(info("a"), fingerprint="fp_new"), info("b"), info("c")
    replicas["b"].calls, replicas["c"].calls = [[token(1), StreamLostError("gone")]], [[token(2, last=True)]]
    replicas["a"].usable = False
    async with backend(a=Handle(lambda: [new, old, other])) as b:
        replicas["c"].usable = False
        seen: list[TokenDelta] = []
        async for deltas in b.generate("a", (REQUEST,), True, RoutingHints()):
            seen += deltas
            replicas["a"].usable = replicas["c"].usable = True
    assert [d.token_ids for d in seen] == [(1,), (2,)]


async def test_no_replica_is_tried_twice(replicas: Replicas) -> None:
    replicas["a"].calls = [[StreamLostError("gone")], GOOD]
    async with backend(a=one()) as b:
        with pytest.raises(ModelUnavailableError) as refused:
            await run(b)
    assert refused.value.retry_after_s > 0 and len(replicas["a"].streams) == 1


async def test_no_replicas_is_an_answer_at_once(replicas: Replicas) -> None:
    replicas["a"].calls = [GOOD]
    handle = Handle(list)
    async with backend(a=handle) as b:
        assert not await b.ready()
        with pytest.raises(ModelUnavailableError):
            await run(b)
        handle.describe = lambda: [DEAD, info("a")]  # one of two is enough
        await settled(lambda: b.models()["a"].max_model_len == 512)
        assert await b.ready()
        assert await run(b) == [1, 2]


async def test_a_connection_that_is_lost_takes_its_replica_out_at_once(replicas: Replicas) -> None:
    replicas["a"].calls, replicas["b"].calls = [GOOD] * 2, [GOOD] * 4
    async with backend(a=Handle(lambda: [info("a"), info("b")])) as b:
        for _ in range(2):
            assert await run(b) == [1, 2]
        replicas["a"].usable = False
        for _ in range(3):
            assert await run(b) == [1, 2]
        replicas["b"].usable = False
        assert not await b.ready()
        with pytest.raises(ModelUnavailableError):
            await run(b)
    assert [len(replicas[name].streams) for name in "ab"] == [1, 4]


@pytest.mark.parametrize("answers", [[], [DEAD], [info("b"), EngineDeadError("x")]], ids=["none", "dead", "unfit"])
async def test_replicas_that_serve_no_longer_names_are_let_go(replicas: Replicas, answers: list[Any]) -> None:
    handle = one()
    async with backend(a=handle) as b:
        assert await b.ready()
        handle.describe = lambda: answers
        await settled(lambda: replicas["a"].retired == 1)
        assert await b.ready() == bool(replicas["b"].connected)
        handle.describe = lambda: [info("a")]
        await settled(lambda: replicas["a"].connected == 2)


@pytest.mark.parametrize("trouble", [TimeoutError(), rpc_error(grpc.StatusCode.UNAVAILABLE), DEAD], ids=repr)
async def test_while_serve_says_nothing_the_connections_count(replicas: Replicas, trouble: Exception) -> None:
    replicas["a"].calls = [GOOD]
    handle = one()
    async with backend(a=handle) as b:
        handle.describe = lambda: trouble  # type: ignore[assignment, return-value]
        asked = handle.asked
        await settled(lambda: handle.asked > asked + 3)
        assert await b.ready() and not replicas["a"].retired
        assert await run(b) == [1, 2]


async def test_a_replica_at_another_address_is_connected_anew(replicas: Replicas) -> None:
    handle = one()
    async with backend(a=handle):
        handle.describe = lambda: [ReplicaInfo(512, "fp_a", Address("a", "127.0.0.1", 2, b"other"))]
        await settled(lambda: replicas["a"].connected == 2)
        assert replicas["a"].retired == 1


async def test_the_next_pool_serves_when_the_first_is_down_lost_or_full(replicas: Replicas) -> None:
    replicas["b"].calls = [GOOD] * 4
    a = Handle(list)
    async with backend(Router("ab", "b"), a=a, b=one("b")) as b:
        assert await run(b) == [1, 2]
        a.describe = lambda: [info("a")]
        await settled(lambda: b.models()["a"].max_model_len > 0)
        for failure in (StreamLostError("gone"), EngineDeadError("x"), QueueFullError("full")):
            replicas["a"].calls = [[failure]]
            assert await run(b) == [1, 2]
    assert len(replicas["b"].streams) == 4


async def test_a_full_replica_is_not_a_full_pool(replicas: Replicas) -> None:
    replicas["a"].calls, replicas["b"].calls = [[QueueFullError("full")]], [GOOD]
    async with backend(a=Handle(lambda: [info("a"), info("b")])) as b:
        await take_turn(b, replicas, "b")
        assert await run(b) == [1, 2]
    assert len(replicas["a"].streams) == 1


async def test_full_everywhere_is_said_so(replicas: Replicas) -> None:
    replicas["a"].calls, replicas["b"].calls = [[QueueFullError("full")]], [[QueueFullError("full")]]
    async with backend(Router("ab", "b"), a=one("a"), b=one("b")) as b:
        with pytest.raises(QueueFullError):
            await run(b)


@pytest.mark.parametrize("error", [ContextLengthError("too long by 3", "prompt"), ReplicaFaultError("bug")], ids=repr)
async def test_other_errors_are_the_answer(replicas: Replicas, error: Exception) -> None:
    replicas["a"].calls, replicas["b"].calls = [[error]], [[error]]
    async with backend(a=Handle(lambda: [info("a"), info("b")])) as b:
        with pytest.raises(type(error)) as raised:
            await run(b)
        assert raised.value is error and await b.ready()
    assert [s.closed for name in "ab" for s in replicas[name].streams] == [True]


@pytest.mark.parametrize("before", [[], [token(1)]], ids=["queued", "streaming"])
async def test_cancelling_the_caller_closes_the_stream(replicas: Replicas, before: list[Step]) -> None:
    replicas["a"].calls = [[*before, asyncio.Event().wait()]]
    async with backend(a=one()) as b:
        task = asyncio.create_task(run(b))
        await settled(lambda: bool(replicas["a"].streams) and not replicas["a"].streams[0].steps)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert replicas["a"].streams[0].closed


async def test_leaving_the_iterator_closes_the_stream(replicas: Replicas) -> None:
    replicas["a"].calls = [GOOD]
    async with backend(a=one()) as b:
        stream = b.generate("a", (REQUEST,), True, RoutingHints())
        await anext(stream)
        await stream.aclose()
    assert replicas["a"].streams[0].closed


@pytest.mark.parametrize("trouble", [DEAD, NOBODY, rpc_error(grpc.StatusCode.UNAVAILABLE), None], ids=repr)
async def test_a_router_in_trouble_is_replaced_by_its_last_table(
    replicas: Replicas, trouble: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_feed, "_PATIENCE_S", 0.01)
    router = Router("a")
    table, router.answer = router.answer, trouble
    replicas["a"].calls = [GOOD]
    async with backend(router, a=one()) as b:
        assert not await b.ready()  # the pool is up, but nobody can say that it serves this model
        with pytest.raises(ModelUnavailableError):
            await run(b)
        router.answer = table
        await settled(lambda: bool(b.models()))
        assert await b.ready()
        router.answer = trouble
        asked = len(router.made)
        await settled(lambda: len(router.made) > asked + 1)
        assert await run(b) == [1, 2]


async def test_nothing_ends_the_tasks_that_follow_serve(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is raised, also what nobody foresaw: without them nothing would ever be learnt again."""
    router, handle = Router("a"), one()
    table, router.answer = router.answer, KeyError("unforeseen")
    monkeypatch.setattr(pool_module.Pool, "_follow", _raise_once(pool_module.Pool._follow))
    async with backend(router, a=handle) as b:
        await settled(lambda: len(router.made) > 2)
        router.answer = table
        await settled(lambda: bool(b.models()) and b.models()["a"].max_model_len > 0)
        assert await b.ready()


def _raise_once(method: Any) -> Any:
    calls = 0

    def wrapped(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise LookupError("unforeseen")
        return method(*args)

    return wrapped


async def test_models_follow_the_table(replicas: Replicas) -> None:
    router = Router("a")
    async with backend(router, a=one()) as b:
        await settled(lambda: set(b.models()) == {"a"})
        routes = RoutingConfig.model_validate({"routes": {"alias": {"pools": ["a"]}}})
        router.answer = compiled(routes, ["a"], (), {"default": 0})
        await settled(lambda: set(b.models()) == {"alias"})
        assert b.models()["alias"].id == "alias" and b.models()["alias"].max_model_len == 512
        with pytest.raises(UnknownModelError) as unknown:
            await run(b)
        assert unknown.value.model_id == "a"


@pytest.mark.parametrize(
    ("config", "hints", "error"),
    [
        ({"tiers": {"default": {"pools": []}}}, RoutingHints(), UnknownModelError),
        ({"targets": {"a": {"max_tokens": 3}}}, RoutingHints(), ContextLengthError),
        ({"targets": {"a": {"abilities": []}}}, RoutingHints(fields={"logprobs": 3}), UnableError),
    ],
)
async def test_what_no_pool_may_serve(
    replicas: Replicas, config: dict[str, Any], hints: RoutingHints, error: type[Exception]
) -> None:
    router = Router("a")
    router.answer = compiled(RoutingConfig.model_validate(config), ["a"], (), {"default": 0})
    async with backend(router, a=one()) as b:
        with pytest.raises(error):
            async for _ in b.generate("a", (REQUEST,), True, hints):
                pass
    assert not replicas["a"].streams

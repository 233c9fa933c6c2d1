"""Two replicas behind real channels, a pool and a dispatcher; replicas come, go, drain and break in the middle."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fake_executor import FakeExecutor
from helpers_gateway import demo_text
from helpers_routing import HANGS, Results

from deployments.channel.replica_info import Address, Load, ReplicaInfo, ReplicaState, ReplicaStatus
from deployments.channel.server import ChannelServer
from deployments.config.routing_table import Limits
from deployments.routing.destinations import RoutedRequest
from deployments.routing.dispatch import Dispatcher
from deployments.routing.errors import ModelUnavailableError, OverloadedError, ReplicaLostError, ReplicaSilentError
from deployments.routing.hints import RoutingHints
from deployments.routing.plan import RoutePlan
from deployments.routing.policies import POLICIES
from deployments.routing.policies.base import RouteHint
from deployments.routing.pool import Pool
from deployments.routing.pool_destination import PoolDestination
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import GenerateRequest, SamplingParams

pytestmark = pytest.mark.sockets

PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PLAN = RoutePlan(("pool",))


@dataclass
class Replica:
    name: str
    engine: AsyncEngine
    executor: FakeExecutor
    server: ChannelServer
    info: ReplicaInfo

    @classmethod
    async def start(cls, name: str, step_s: float = 0.002) -> Replica:
        executor = FakeExecutor(num_blocks=256)
        executor.step_s = step_s
        config = EngineConfig("none", max_num_batched_tokens=64)
        engine = AsyncEngine(Engine(config, executor=executor, text=demo_text()))
        server = ChannelServer(engine, b"secret", 100)
        port = await server.start("127.0.0.1")
        root = tuple(sorted(engine.engine.prefix_root.items()))
        return cls(
            name, engine, executor, server, ReplicaInfo(512, "fp", Address(name, "127.0.0.1", port, b"secret"), root)
        )

    def kill(self) -> None:
        """As SIGKILL would look from outside."""
        assert self.server._server is not None
        self.server._server.close()
        for link in self.server.links:
            link.drop("killed")

    async def stop(self) -> None:
        await self.server.close(0.1)
        await asyncio.to_thread(self.engine.close)


@dataclass
class Serve:
    """What Serve says of the pool."""

    replicas: list[Replica] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)  # what further replicas answer
    open: asyncio.Event | None = None

    def gate(self) -> asyncio.Event:
        """Until it is set, Serve says nothing."""
        self.open = asyncio.Event()
        return self.open

    def broadcast(self, method: str) -> Results:
        assert method == "describe"
        return Results(self.answers)

    async def answers(self) -> list[Any]:
        if self.open is not None:
            await self.open.wait()
        return [*(replica.info for replica in self.replicas), *self.others]


@dataclass
class Bench:
    serve: Serve
    pool: Pool
    destination: PoolDestination
    dispatcher: Dispatcher

    async def run(self, request: GenerateRequest, plan: RoutePlan = PLAN, streamed: bool = True) -> str:
        text = ""
        async for deltas in self.dispatcher.generate(RoutedRequest((request,), streamed, RoutingHints()), plan):
            text += "".join(delta.text for delta in deltas)
        return text

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.001)

    def usable(self) -> int:
        return self.pool.num_usable


@asynccontextmanager
async def bench(names: str = "ab", max_queue_s: float | None = None) -> AsyncIterator[Bench]:
    serve = Serve([await Replica.start(name) for name in names])
    everyone = list(serve.replicas)
    policy = POLICIES.get("prefix_affinity")()
    pool = Pool("pool", serve, policy, lambda info: None, random.Random(1), 16, poll_s=0.01)  # type: ignore[arg-type]
    clock = asyncio.get_running_loop().time
    destination = PoolDestination(pool, max_queue_s, clock)
    made = Bench(serve, pool, destination, Dispatcher({"pool": destination}, clock))
    watch = asyncio.create_task(pool.watch())
    try:
        await made.until(lambda: made.usable() == len(names))
        yield made
    finally:
        watch.cancel()
        pool.close()
        for replica in {id(r): r for r in [*everyone, *serve.replicas]}.values():
            await replica.stop()


def request(number: int, **changes: Any) -> GenerateRequest:
    return GenerateRequest(f"r{number}", tuple(range(10 + number, 40 + number)), replace(PARAMS, **changes))


async def test_a_killed_replica_under_many_streams_is_not_noticed() -> None:
    async with bench() as b:
        right = [await b.run(request(i)) for i in range(12)]
        a = b.serve.replicas[0]
        running = [asyncio.create_task(b.run(request(i), streamed=i % 3 > 0)) for i in range(12)]
        await b.until(lambda: a.engine.stats().running >= 4)
        b.serve.replicas.remove(a)
        a.kill()
        assert await asyncio.gather(*running) == right
        assert b.usable() == 1
        assert b.pool.prefixes.num_held("a") == 0


async def test_the_only_replica_is_missed() -> None:
    plan = replace(PLAN, limits=Limits(resume_within_s=0.0))
    async with bench("a") as b:
        running = asyncio.create_task(b.run(request(1, max_tokens=400), plan))
        await b.until(lambda: b.serve.replicas[0].engine.stats().generated_tokens > 5)
        b.serve.replicas[0].kill()
        with pytest.raises(ReplicaLostError):
            await running
        with pytest.raises(ModelUnavailableError):
            await b.run(request(2))


async def test_a_stream_waits_for_the_successor_of_the_only_replica() -> None:
    async with bench("a") as b:
        right = await b.run(request(1, max_tokens=300))
        running = asyncio.create_task(b.run(request(1, max_tokens=300)))
        [a] = b.serve.replicas
        await b.until(lambda: a.engine.stats().running > 0 and a.engine.stats().generated_tokens > 310)
        a.kill()
        await b.until(lambda: not b.pool.up)  # else it looks as if Serve had taken it out
        b.serve.replicas.clear()
        await b.until(lambda: not b.pool.num_replicas)
        with pytest.raises(ModelUnavailableError):
            await b.run(request(2))  # nobody has got anything of this one: its client may ask again
        assert not running.done()
        b.serve.replicas.append(await Replica.start("b"))
        assert await running == right


@pytest.mark.parametrize("how", ["leaving", "taken", "drained"])
async def test_nobody_waits_for_a_replica_that_was_taken_out(how: str) -> None:
    plan = replace(PLAN, limits=Limits(resume_within_s=1e9))
    async with bench("a") as b:
        running = asyncio.create_task(b.run(request(1, max_tokens=400), plan))
        [a] = b.serve.replicas
        await b.until(lambda: a.engine.stats().generated_tokens > 5)
        if how == "leaving":
            await a.server.drain(0.01)
        elif how == "taken":
            b.serve.replicas.clear()
            await b.until(lambda: not b.pool.num_replicas)
        else:
            a.server.take_out(0.01)
        if how != "drained":
            await a.stop()
        with pytest.raises(ReplicaLostError):
            await running


@pytest.mark.parametrize("told", ["before", "by the refusal"])
async def test_a_new_request_waits_for_the_successor_that_is_there_already(told: str) -> None:
    """As in a rolling update whose news of the new replica comes later than that of the old one's end."""
    async with bench("a") as b:
        [a] = b.serve.replicas
        right = await b.run(request(1))
        asked = b.serve.gate()
        leaving = asyncio.create_task(a.server.drain(0))
        if told == "before":
            await b.until(lambda: b.usable() == 0)
        running = asyncio.create_task(b.run(request(1)))
        await b.until(lambda: b.usable() == 0)
        b.serve.replicas[:] = [await Replica.start("b")]
        assert not running.done()
        asked.set()
        assert await running == right and b.serve.replicas[0].engine.stats().generated_tokens == 40
        await leaving


async def test_a_new_request_is_refused_once_there_is_no_successor() -> None:
    async with bench("a") as b:
        await b.serve.replicas[0].server.drain(0)
        await b.until(lambda: b.usable() == 0)
        with pytest.raises(ModelUnavailableError):
            await b.run(request(1))
        assert b.usable() == 0 and not b.pool.successor_expected


async def test_a_replica_out_of_rotation_lets_streams_end_or_sends_them_on() -> None:
    async with bench() as b:
        right = [await b.run(request(i, max_tokens=300)) for i in range(6)]
        for within_s in (None, 0.01):
            running = [asyncio.create_task(b.run(request(i, max_tokens=300), streamed=i % 2 > 0)) for i in range(6)]
            a, other = b.serve.replicas
            await b.until(lambda: all(r.engine.stats().running for r in b.serve.replicas))
            # All prompts are computed, so that only a new request can add to them.
            await b.until(lambda: sum(r.engine.stats().running for r in b.serve.replicas) == 6)
            await b.until(lambda: not any(r.engine.stats().pending_tokens for r in b.serve.replicas))
            a.server.take_out(within_s)
            await b.until(lambda: b.usable() == 1)
            before = a.engine.stats().prompt_tokens
            assert await b.run(request(9)) and a.engine.stats().prompt_tokens == before
            assert await asyncio.gather(*running) == right
            assert b.pool.up and not b.pool.drained
            other.server.take_out(None)
            await b.until(lambda: b.pool.drained)
            assert not b.pool.up
            with pytest.raises(ModelUnavailableError):
                await b.run(request(9))
            for replica in b.serve.replicas:
                replica.server.put_back()
            await b.until(lambda: b.usable() == 2)


async def test_no_resumption_where_the_route_forbids_it() -> None:
    plan = replace(PLAN, limits=Limits(max_resumptions=0))
    async with bench() as b:
        running = asyncio.create_task(b.run(request(1, max_tokens=400), plan))
        await b.until(lambda: any(r.engine.stats().generated_tokens > 5 for r in b.serve.replicas))
        busy = next(r for r in b.serve.replicas if r.engine.stats().running)
        busy.kill()
        with pytest.raises(ReplicaLostError):
            await running


async def test_a_draining_replica_finishes_and_gets_nothing_new() -> None:
    async with bench() as b:
        right = await b.run(request(1))
        running = asyncio.create_task(b.run(request(1)))
        await b.until(lambda: any(r.engine.stats().running for r in b.serve.replicas))
        leaving = next(r for r in b.serve.replicas if r.engine.stats().running)
        other = next(r for r in b.serve.replicas if r is not leaving)
        draining = asyncio.create_task(leaving.server.drain(60))
        await b.until(lambda: b.usable() == 1)
        before = other.executor.steps
        assert await b.run(request(1)) == right and other.executor.steps > before
        assert await running == right
        await draining


async def test_a_drain_that_is_cut_short_goes_on_elsewhere() -> None:
    async with bench() as b:
        right = await b.run(request(1, max_tokens=300))
        running = asyncio.create_task(b.run(request(1, max_tokens=300)))
        await b.until(lambda: any(r.engine.stats().running for r in b.serve.replicas))
        leaving = next(r for r in b.serve.replicas if r.engine.stats().running)
        await leaving.server.drain(0.01)
        b.serve.replicas.remove(leaving)
        await leaving.stop()
        assert await running == right


async def test_equal_prompts_follow_their_prefix_and_replicas_tell_what_they_have() -> None:
    async with bench() as b:
        long = GenerateRequest("r0", tuple(i % 190 for i in range(400)), replace(PARAMS, max_tokens=4))
        for i in range(8):
            await b.run(replace(long, request_id=f"r{i}"))
        served = sorted(r.engine.stats().prompt_tokens for r in b.serve.replicas)
        assert served == [0, 8 * 400]
        owner = max(b.serve.replicas, key=lambda r: r.engine.stats().prompt_tokens)
        b.pool.prefixes.forget(owner.name)  # another gateway would not know either
        owner.server.prefixes.update([])
        await b.until(lambda: b.pool.prefixes.num_held(owner.name) > 0)


async def test_a_new_gateway_hears_of_the_prefixes_that_are_there() -> None:
    async with bench("a") as b:
        await b.run(request(1))
        await b.until(lambda: len(b.serve.replicas[0].server.prefixes.all) > 0)
        policy = POLICIES.get("prefix_affinity")()
        other = Pool("pool", b.serve, policy, lambda info: None, random.Random(1), 16, poll_s=0.01)  # type: ignore[arg-type]
        watch = asyncio.create_task(other.watch())
        await b.until(lambda: other.prefixes.num_held("a") > 0)
        watch.cancel()
        other.close()


async def test_a_queue_too_long_sheds_the_lowest_tier_first() -> None:
    async with bench("a", max_queue_s=10.0) as b:
        [member] = b.pool._members.values()
        member.rate.tokens_per_s = 100.0
        member.channel.load = Load(waiting=3, running=4, pending_tokens=400)
        for share in (0.5, 0.25):
            with pytest.raises(OverloadedError) as refused:
                await b.run(request(1), replace(PLAN, queue_share=share))
            assert refused.value.retry_after_s == pytest.approx((400 + 3 * 128) / 100 - 10.0 * share)
        assert await b.run(request(1), replace(PLAN, queue_share=1.0))


async def test_the_first_word_of_an_unstreamed_answer_comes_early() -> None:
    async with bench("a") as b:
        stream = b.dispatcher.generate(RoutedRequest((request(1, max_tokens=300),), False, RoutingHints()), PLAN)
        first = await anext(stream)
        assert first[0].num_completion_tokens < 300
        rest = [deltas async for deltas in stream]
        assert len(rest) < 30 and rest[-1][0].finish_reason is not None  # not one for each of 300 steps
        assert sum(len(d.token_ids) for deltas in [first, *rest] for d in deltas) == 300


async def test_long_prompts_are_looked_at_in_pieces_and_only_where_somebody_looks() -> None:
    async with bench() as b:
        long = GenerateRequest("r0", tuple(i % 190 for i in range(16 * 300 + 1)), PARAMS)
        turns: list[int] = []

        async def neighbour() -> None:
            while True:
                turns.append(1)
                await asyncio.sleep(0)

        beside = asyncio.create_task(neighbour())
        assert len(await b.destination.prefix_keys([long])) == 300 and turns
        beside.cancel()
        b.serve.replicas[0].server.take_out(None)
        await b.until(lambda: b.usable() == 1)
        assert await b.destination.prefix_keys([long]) == []  # no choice to be made


async def test_one_hung_replica_hides_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.routing.pool._LOOK_S", 0.05)
    async with bench("ab") as b:
        b.serve.others.append(HANGS)
        b.serve.replicas.append(await Replica.start("c"))  # is found
        await b.until(lambda: b.usable() == 3)
        c, a = b.serve.replicas.pop(), b.serve.replicas.pop(0)
        c.kill()  # is let go of, as its connection is gone
        await b.until(lambda: b.pool.num_replicas == 2)
        assert b.usable() == 2  # "a" may be the one that hangs
        b.serve.others.clear()
        await b.until(lambda: b.pool.num_replicas == 1)
        await a.stop()
        await c.stop()


async def test_what_a_retired_replica_still_tells_is_not_remembered() -> None:
    async with bench("a") as b:
        channel = b.pool.choose(RouteHint(1, None, {}), ())
        assert channel is not None
        channel.on_prefixes([b"k" * 16], [])
        assert b.pool.prefixes.num_held("a") > 0
        b.serve.replicas.clear()
        await b.until(lambda: not b.pool.num_replicas)
        channel.on_prefixes([b"k" * 16], [])  # its last streams still ran
        assert b.pool.prefixes.num_held("a") == 0


class _States:
    """Serve: one replica answers an operator, the other one does not."""

    async def answers(self) -> list[Any]:
        return [ReplicaState("b", ReplicaStatus.ACTIVE, 1, 2, 3), HANGS]

    def broadcast(self, method: str, *_: Any) -> Results:
        return Results(self.answers)


async def test_an_operator_sees_a_silent_replica_and_can_drain_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.routing.pool._PATIENCE_S", 0.05)
    async with bench("ab") as b:
        b.pool.handle = _States()  # type: ignore[assignment]
        states = await b.pool.states()
        assert [(s.replica_id, s.status) for s in states] == [("a", "silent"), ("b", "active")]
        assert await b.pool.drain("b", None) == states
        with pytest.raises(ReplicaSilentError, match="'a' did not answer within"):
            await b.pool.drain("a", None)

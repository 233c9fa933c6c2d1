"""An outcome in a dozen numbers, and those as a table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoscaling.simulator.run import Outcome


@dataclass(frozen=True, slots=True)
class Summary:
    """`slo_attainment`: the share of all requests, refused and unfinished ones included, with a first token within
    the SLO. Percentiles are of those that got one; None without any. `scale_events`: changes of the target;
    `reversals`: those against the direction of the one before."""

    policy: str
    slo_attainment: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    replica_hours: float
    peak_replicas: int
    scale_events: int
    reversals: int
    requests: int
    rejected: int
    faults: int


def summarise(label: str, outcome: Outcome, ttft_slo_s: float) -> Summary:
    """`label`: the policy's name in tables."""
    ttft = outcome.ttft_s
    got = ttft[~np.isnan(ttft)]
    p50, p95, p99 = (float(q) for q in np.quantile(got, [0.5, 0.95, 0.99])) if len(got) else (None, None, None)
    targets = np.concatenate([outcome.timeline.target[:1], [d.target for _, d in outcome.events]])
    moves = np.sign(np.diff(targets))
    moves = moves[moves != 0]
    return Summary(
        label,
        float(np.count_nonzero(got <= ttft_slo_s)) / len(ttft),
        p50,
        p95,
        p99,
        outcome.replica_s / 3600,
        int(outcome.timeline.serving.max()),
        len(outcome.events),
        int(np.count_nonzero(moves[1:] != moves[:-1])),
        len(ttft),
        outcome.rejected,
        outcome.faults,
    )


HEADS = ("policy", "SLO met", "TTFT p50", "p95", "p99", "replica-hours", "peak", "changes", "reversals", "rejected")


def cells(summary: Summary) -> tuple[str, ...]:
    """One text for each of HEADS."""
    s = summary
    return (
        s.policy,
        f"{s.slo_attainment:.2%}",
        _seconds(s.ttft_p50_s),
        _seconds(s.ttft_p95_s),
        _seconds(s.ttft_p99_s),
        f"{s.replica_hours:.2f}",
        str(s.peak_replicas),
        str(s.scale_events),
        str(s.reversals),
        str(s.rejected),
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s" if value >= 0.1 else f"{value * 1000:.0f} ms"

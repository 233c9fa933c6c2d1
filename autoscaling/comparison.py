"""Policies against the baseline at the same cost: `ongoing` with whatever target makes its replica-hours, or its
attainment, equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np

from autoscaling.report.summary import Summary, summarise
from autoscaling.settings import PolicyError
from autoscaling.simulator.run import Outcome, Setup, simulate
from autoscaling.spec import PolicySpec
from autoscaling.traces.trace import Trace

LOWEST, HIGHEST = 0.25, 4096.0  # target_ongoing_requests: from far too many replicas to far too few
_CLOSE = 0.005  # of the target's logarithm: half a percent changes no replica, and each halving costs a simulation


@dataclass(frozen=True, slots=True, eq=False)
class Tried:
    """One simulation of the baseline: with which settings, what happened, and the numbers of that."""

    spec: PolicySpec
    outcome: Outcome
    summary: Summary


class Baseline:
    """`ongoing` on one trace, each target simulated once."""

    def __init__(self, spec: PolicySpec, trace: Trace, setup: Setup, ttft_slo_s: float) -> None:
        self._spec, self._trace, self._setup, self._slo = spec, trace, setup, ttft_slo_s
        self._tried: dict[float, Tried] = {}

    def at_target(self, target: float) -> Tried:
        """With `target` ongoing requests per replica, to four digits."""
        target = float(f"{target:.4g}")
        if target not in self._tried:
            spec = self._spec.with_params(f"{self._spec.label} @{target:g}", target_ongoing_requests=target)
            outcome = simulate(self._trace, spec.controller(), self._setup)
            self._tried[target] = Tried(spec, outcome, summarise(spec.label, outcome, self._slo))
        return self._tried[target]

    def at_hours(self, hours: float) -> Tried:
        """That whose replica-hours are nearest; more of them where the bounds keep it from equality."""
        self._search(lambda tried: tried.summary.replica_hours > hours)
        return min(self._tried.values(), key=lambda tried: abs(tried.summary.replica_hours - hours))

    def at_attainment(self, attainment: float) -> Tried | None:
        """The cheapest tried with at least so much; None if even the lowest target does not reach it."""
        self._search(lambda tried: tried.summary.slo_attainment >= attainment)
        good = [tried for tried in self._tried.values() if tried.summary.slo_attainment >= attainment]
        return min(good, key=lambda tried: tried.summary.replica_hours, default=None)

    def _search(self, more_wanted: Callable[[Tried], bool]) -> None:
        """Bisect for the highest target that still satisfies: replica-hours fall with the target."""
        low, high = math.log(LOWEST), math.log(HIGHEST)
        while high - low >= _CLOSE:
            middle = (low + high) / 2
            if more_wanted(self.at_target(math.exp(middle))):
                low = middle
            else:
                high = middle


@dataclass(frozen=True, slots=True)
class Comparison:
    """`cheaper`: the share of replica-hours saved against the baseline with at least the same attainment; None where
    no target of the baseline reaches that. `most`: max_replicas all the time. `reachable`: the share of requests whose
    prompt alone does not take longer than the SLO: no number of replicas attains more."""

    HEADS: ClassVar[tuple[str, ...]] = (
        "trace", "SLO met", "replica-hours", "ongoing, same hours", "ongoing, same SLO", "hours saved",
        "all replicas always", "reachable",
    )  # fmt: skip
    trace: str
    notes: tuple[str, ...]
    policy: Summary
    same_hours: Summary
    same_slo: Summary | None
    most: Summary
    reachable: float

    @property
    def cheaper(self) -> float | None:
        """The share of the baseline's replica-hours that the policy saves at the same attainment."""
        return 1 - self.policy.replica_hours / self.same_slo.replica_hours if self.same_slo else None

    def cells(self) -> tuple[str, ...]:
        """One text for each of HEADS."""
        s, slo = self.same_hours, self.same_slo
        return (
            self.trace,
            f"{self.policy.slo_attainment:.2%}",
            f"{self.policy.replica_hours:.1f}",
            f"{s.slo_attainment:.2%} ({s.replica_hours:.1f} h)",
            f"{slo.slo_attainment:.2%} ({slo.replica_hours:.1f} h)" if slo else "never",
            "-" if self.cheaper is None else f"{self.cheaper:.0%}",
            f"{self.most.slo_attainment:.2%} ({self.most.replica_hours:.1f} h)",
            f"{self.reachable:.2%}",
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "cheaper": self.cheaper}


def compare(policy: PolicySpec, baseline: PolicySpec, trace: Trace, setup: Setup, ttft_slo_s: float) -> Comparison:
    """`baseline` must be an `ongoing` one; its target is searched. Raises PolicyError."""
    if baseline.policy != "ongoing":
        raise PolicyError(f"baseline: must be of policy ongoing, got {baseline.policy}")
    own = summarise(policy.label, simulate(trace, policy.controller(), setup), ttft_slo_s)
    tried = Baseline(baseline, trace, setup, ttft_slo_s)
    same_hours, same_slo = tried.at_hours(own.replica_hours), tried.at_attainment(own.slo_attainment)
    return Comparison(
        trace.name,
        trace.notes,
        own,
        same_hours.summary,
        same_slo.summary if same_slo else None,
        _always_most(policy, trace, setup, ttft_slo_s),
        float(np.mean(setup.model.alone_s(trace.prompt_tokens) <= ttft_slo_s)),
    )


def _always_most(policy: PolicySpec, trace: Trace, setup: Setup, ttft_slo_s: float) -> Summary:
    most = policy.guardrails.max_replicas
    fixed = replace(policy, guardrails=replace(policy.guardrails, min_replicas=most))
    outcome = simulate(trace, fixed.controller(), replace(setup, initial_replicas=most))
    return summarise(f"{most} replicas", outcome, ttft_slo_s)

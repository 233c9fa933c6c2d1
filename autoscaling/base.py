"""What a policy sees and says, and the table of policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from autoscaling.settings import Settings
from engine.registry import Registry


class ReplicaSample(NamedTuple):
    """What one replica last reported, at `at_s`. None (or NaN) is unknown, never zero.

    Counts are of sequences or tokens at that moment; rates and percentiles are over the last `WINDOW_S` seconds.
    `utilisation`: (time in steps - steps x the shortest step) / time: work per second. A step's time is a fixed part
    plus work proportional to its tokens, and a busy engine always steps, so that how long its steps take, not
    whether it steps, tells how full it is. `backlog_s`: pending prompt tokens over the rate at which they were lately
    computed while any were pending. `seats_used`: running / max_num_seqs.
    """

    at_s: float
    waiting: float | None = None
    running: float | None = None
    pending_tokens: float | None = None
    backlog_s: float | None = None
    utilisation: float | None = None
    seats_used: float | None = None
    kv_usage: float | None = None
    arrival_rate: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    itl_p95_s: float | None = None
    startup_s: float | None = None


WINDOW_S = 10.0
"""Over how long replicas measure their rates and percentiles. A replica that serves for less divides by it too: the sum
over the pool is then right while a new one takes load from the others; a rate over its own short life, at which it gets
all the requests that find it empty, would make a pool scale up because it just did."""


@dataclass(frozen=True, slots=True)
class Signals:
    """One pool. Sums are over all serving replicas: those that fell silent count as the mean of those that did not.

    `serving` take requests, `starting` will; `target` is what was last asked for. `queued`: requests no replica
    has. `reporting`: how many serving replicas have a fresh sample. With none, all sums are None: unknown. Percentiles
    are means over the replicas that have any; `startup_s` is the largest.
    """

    serving: int
    starting: int
    target: int
    queued: float
    reporting: int
    waiting: float | None = None
    running: float | None = None
    pending_tokens: float | None = None
    backlog_s: float | None = None
    utilisation: float | None = None
    seats_used: float | None = None
    kv_used: float | None = None
    arrival_rate: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    itl_p95_s: float | None = None
    startup_s: float | None = None

    @property
    def ongoing(self) -> float | None:
        """Requests in the pool, those that no replica has yet included."""
        if self.waiting is None or self.running is None:
            return self.queued if self.serving == 0 else None
        return self.queued + self.waiting + self.running


def pool_signals(
    samples: Iterable[ReplicaSample],
    now_s: float,
    *,
    serving: int,
    starting: int,
    target: int,
    queued: float = 0.0,
    silent: int = 0,
    stale_after_s: float = 10.0,
) -> Signals:
    """Samples of `serving` replicas, at most one each, as one pool. Those older than `stale_after_s` do not count.
    `silent`: how many of them should have a fresh sample and do not. One that just began to serve is none of those:
    it has no load worth counting yet."""
    fresh = [s for s in samples if now_s - s.at_s <= stale_after_s]
    if not fresh:
        return Signals(serving, starting, target, queued, 0)
    columns = [[v for v in column if v is not None and v == v] for column in zip(*fresh, strict=True)]  # v == v: no NaN
    _, waiting, running, pending, backlog, utilisation, seats, kv, arrivals, p50, p95, itl, startup = columns
    return Signals(
        serving,
        starting,
        target,
        queued,
        len(fresh),
        _total(waiting, silent),
        _total(running, silent),
        _total(pending, silent),
        _total(backlog, silent),
        _total(utilisation, silent),
        _total(seats, silent),
        _total(kv, silent),
        _total(arrivals, silent),
        _mean(p50),
        _mean(p95),
        _mean(itl),
        max(startup, default=None),
    )


def _total(known: Sequence[float], silent: int) -> float | None:
    return sum(known) * (1 + silent / len(known)) if known else None


def _mean(known: Sequence[float]) -> float | None:
    return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True)
class Proposal:
    """How many replicas a policy would have, not rounded and without bounds. `why` names the rule that decided;
    `terms` are the numbers it went by. `hold`: nothing is known, so the number stands for "as it is"."""

    replicas: float
    why: str
    terms: dict[str, float] = field(default_factory=dict)
    hold: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What the pool's target becomes. `why` is the policy's reason; `limits` are the guardrails that changed the
    number, in order; `fault` is what went wrong, if anything did: then the last target stands."""

    target: int
    proposed: float | None
    why: str
    limits: tuple[str, ...] = ()
    fault: str | None = None
    terms: dict[str, float] = field(default_factory=dict)


class ScalingPolicy(Protocol):
    """Says how many replicas would be right now. Owns its state; new object, new state. May raise: Controller copes.

    `now_s` only ever grows. `Params` are its settings. `raw`: the policy has delays of its own and wants only bounds.
    """

    Params: ClassVar[type[Settings]]
    raw: ClassVar[bool]

    @classmethod
    def build(cls, params: Any) -> Self:
        """A policy without a past. `params`: of the type `Params`."""

    def decide(self, signals: Signals, now_s: float) -> Proposal:
        """Called about once a second with what the pool says of itself."""


POLICIES: Registry[ScalingPolicy] = Registry(
    "autoscaling policy",
    {
        "slo": "autoscaling.policies.slo:LatencySlo",
        "queue_depth": "autoscaling.policies.queue_depth:QueueDepth",
        "ongoing": "autoscaling.policies.ongoing:OngoingRequests",
        "schedule": "autoscaling.policies.schedule:Schedule",
        "predictive": "autoscaling.policies.predictive:Predictive",
        "composite": "autoscaling.policies.composite:Composite",
    },
)

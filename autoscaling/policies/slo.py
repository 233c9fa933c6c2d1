"""Hold a time to first token at the least cost: enough replicas for the work that comes, for what is queued, and for
what will come until a replica started now serves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from autoscaling.base import Proposal, Signals
from autoscaling.demand import Demand, Growth
from autoscaling.settings import Settings, setting


@dataclass(frozen=True, slots=True)
class SloParams(Settings):
    """`ttft_slo_s`: the time to first token that p95 is to stay within. `utilisation`: how full replicas are to be
    as long as it does; the TTFT's error moves it by up to `integral_limit` of itself, `integral_gain` of that a second.
    `backlog_share`: of the SLO that a replica's backlog may take; more is to be cleared within `clear_s`.
    `growth_quantile`: how much of the rises of the last `growth_window_s` the forecast covers; 0 looks at the present
    trend alone. `kv_usage`, `seats_share`: how full K/V and seats may be. `itl_slo_s`: optional, what p95 of the time
    between tokens is to stay within. `startup_s`: of a replica, until one has been seen."""

    ttft_slo_s: float = setting(1.0, above=0)
    utilisation: float = setting(0.7, 0.05, 1.0)
    integral_gain: float = setting(0.005, 0)
    integral_limit: float = setting(0.25, 0, 0.9)
    backlog_share: float = setting(0.5, 0)
    clear_s: float = setting(20.0, above=0)
    growth_window_s: float = setting(3600.0, 0)
    growth_quantile: float = setting(0.98, 0, 1.0)
    kv_usage: float = setting(0.85, above=0, high=1.0)
    seats_share: float = setting(0.85, above=0, high=1.0)
    itl_slo_s: float | None = setting(None, above=0)
    startup_s: float = setting(30.0, 0)


_REACTION_S = 10.0  # signals and decision take their time too
_BRIEFLY = 0.9  # how full replicas may be for as long as a peak lasts
_BOLDNESS = 0.8  # of the integral limit that the correction may go upward: good days hide how full is too full
_WIDE = 0.5  # p95 below so much of the SLO: replicas may be fuller
_EASE = 0.5  # of the gain at which they become so


class LatencySlo:
    """The largest of three needs: work, K/V, seats. See docs/autoscaling.md for the reasoning."""

    Params: ClassVar[type[Settings]] = SloParams
    raw: ClassVar[bool] = False

    def __init__(self, params: SloParams) -> None:
        self._params = params
        self._demand = Demand()
        self._growth = Growth(params.growth_window_s, params.growth_quantile)
        self._correction = 0.0  # of the utilisation aimed at, as a share of it
        self._startup_s = params.startup_s
        self._last_s: float | None = None

    @classmethod
    def build(cls, params: SloParams) -> Self:
        """A policy without a past."""
        return cls(params)

    def decide(self, signals: Signals, now_s: float) -> Proposal:
        """The largest of the needs for time to first token, time between tokens, K/V and seats."""
        s, p = signals, self._params
        if s.startup_s is not None:
            self._startup_s = s.startup_s
        if s.serving == 0:
            return Proposal(max(s.target, s.queued > 0), "no replica serves", {"queued": s.queued}, hold=not s.queued)
        backlog = s.backlog_s or 0.0
        allowed = p.backlog_share * p.ttft_slo_s * s.serving
        demand = self._demand.update(s, now_s, allowed)
        self._correct(s, now_s)
        if demand is None:
            return Proposal(s.target, "unknown", hold=True)
        horizon_s = self._startup_s + _REACTION_S
        trend, usual = self._growth.update(demand, horizon_s, now_s)
        aim = min(0.98, p.utilisation * (1.0 + self._correction))
        clearing = max(0.0, backlog - allowed) / p.clear_s
        needs = {
            "work": (demand + trend + clearing) / aim,
            # What usually follows keeps what is there and adds nothing: no pool grows, or swings, by memory alone.
            "room": min(float(s.target), (demand + clearing) / aim + usual / max(aim, _BRIEFLY)),
            "kv": (s.kv_used or 0.0) / p.kv_usage,
            "seats": (s.seats_used or 0.0) / p.seats_share,
        }
        if p.itl_slo_s is not None and s.itl_p95_s is not None:
            needs["itl"] = s.serving * min(2.0, s.itl_p95_s / p.itl_slo_s) if s.itl_p95_s > 0.8 * p.itl_slo_s else 0.0
        why = max(needs, key=lambda name: needs[name])
        if why == "work" and clearing > max(trend, 0.1 * demand):
            why = "backlog"
        elif why == "work" and trend > 0.1 * demand:
            why = "forecast"
        terms = {"demand": demand, "trend": trend, "usual": usual, "clearing": clearing, "aim": aim, **needs}
        return Proposal(needs["work" if why in ("backlog", "forecast") else why], why, terms)

    def _correct(self, s: Signals, now_s: float) -> None:
        """Integrate the TTFT's error. Not while replicas start: what is late now is what they are coming for."""
        p = self._params
        elapsed = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        if s.ttft_p95_s is None or s.starting or s.serving != s.target:
            return
        ratio = s.ttft_p95_s / p.ttft_slo_s
        error = min(1.0, math.log(max(ratio, 1e-3) / 0.8)) if ratio > 0.8 else -_EASE * max(0.0, _WIDE - ratio)
        self._correction -= error * p.integral_gain * elapsed
        self._correction = max(-p.integral_limit, min(_BOLDNESS * p.integral_limit, self._correction))

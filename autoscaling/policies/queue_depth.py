"""So many waiting requests for each replica, and no fewer running than keep it busy: simple and hard to get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from autoscaling.base import Proposal, Signals
from autoscaling.settings import Settings, setting


@dataclass(frozen=True, slots=True)
class QueueDepthParams(Settings):
    """`waiting_per_replica`: what one may have in its queue. `seats_share`: of a replica's seats that may be taken."""

    waiting_per_replica: float = setting(2.0, above=0)
    seats_share: float = setting(0.6, above=0, high=1.0)


class QueueDepth:
    """Replicas that would keep both the queue and the seats at their target, those starting counted in."""

    Params: ClassVar[type[Settings]] = QueueDepthParams
    raw: ClassVar[bool] = False

    def __init__(self, params: QueueDepthParams) -> None:
        self._params = params

    @classmethod
    def build(cls, params: QueueDepthParams) -> Self:
        """A policy without a past."""
        return cls(params)

    def decide(self, signals: Signals, now_s: float) -> Proposal:
        """Seats or queue, whichever asks for more."""
        s, p = signals, self._params
        if s.serving == 0:
            return Proposal(max(s.target, s.queued > 0), "no replica serves", {"queued": s.queued}, hold=not s.queued)
        if s.waiting is None and s.seats_used is None:
            return Proposal(s.target, "unknown", hold=True)
        seats = (s.seats_used or 0.0) / p.seats_share
        # A queue is there because what serves now is not enough: it asks for more than that.
        waiting = (s.waiting or 0.0) + s.queued
        excess = waiting - p.waiting_per_replica * s.serving
        queue = s.serving + excess / p.waiting_per_replica if excess > 0 else 0.0
        terms = {"seats": seats, "queue": queue, "waiting": waiting}
        return Proposal(max(seats, queue), "queue" if queue > seats else "seats", terms)

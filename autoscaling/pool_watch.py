"""What Serve's controller knows of one pool, as Signals. Pure; time is an argument, and the controller's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from autoscaling.base import ReplicaSample, Signals, pool_signals

_REMEMBERED_STARTS = 4
_FIELDS = frozenset(ReplicaSample._fields) - {"at_s"}


class Stamped(Protocol):
    """One value of a metric, and when the replica measured it, by its own clock."""

    timestamp: float
    value: float


Raw = Mapping[str, Mapping[str, Sequence[Stamped]]]
"""Metric -> replica -> values, oldest first."""


class PoolWatch:
    """Told everything in turn. A replica's sample is as old as the time since something new came from it, so that
    clocks of other machines do not matter; what was not in its newest sample is unknown. How long replicas take to
    start is measured from the decision to the moment they serve."""

    def __init__(self, stale_after_s: float = 10.0) -> None:
        self._stale_after_s = stale_after_s
        self._since_s: dict[str, float] = {}  # replica -> when it was first seen to serve
        self._newest: dict[str, tuple[float, float]] = {}  # replica -> its own time, ours
        self._asked_s: deque[float | None] = deque()  # replicas that do not serve yet; None: asked for before we looked
        self._startups_s: deque[float] = deque(maxlen=_REMEMBERED_STARTS)
        self._target: int | None = None
        self._looked_s = 0.0

    def signals(
        self,
        now_s: float,
        raw: Raw,
        serving: Sequence[str],
        target: int,
        queued: float,
        last_up_s: float | None = None,
    ) -> Signals:
        """`serving`: ids of all replicas that take requests; `target`: how many were last asked for. `last_up_s`: when
        that last rose, which may be long before Serve asks again: about a pool that requests wake it does not, until
        the first replica serves."""
        self._note_target(target, len(serving), now_s, last_up_s)
        self._note_serving(serving, now_s)
        samples = {name: sample for name in serving if (sample := self._sample(name, raw, now_s)) is not None}
        settled = {name for name, since_s in self._since_s.items() if now_s - since_s > self._stale_after_s}
        fresh = {name for name, sample in samples.items() if now_s - sample.at_s <= self._stale_after_s}
        return pool_signals(
            samples.values(),
            now_s,
            serving=len(serving),
            starting=max(0, target - len(serving)),
            target=target,
            queued=queued,
            silent=len(settled - fresh),
            stale_after_s=self._stale_after_s,
        )

    def awaits_first(self, now_s: float) -> bool:
        """Whether replicas serve, none of them has ever reported, and none serves for so long that it should have."""
        if not self._since_s or self._newest:
            return False
        return now_s - min(self._since_s.values()) <= self._stale_after_s

    def _note_target(self, target: int, serving: int, now_s: float, last_up_s: float | None) -> None:
        if self._target is None:
            self._asked_s.extend([None] * (target - serving))
        change = 0 if self._target is None else target - self._target
        self._target = target
        told = last_up_s is not None and self._looked_s < last_up_s <= now_s
        self._asked_s.extend([last_up_s if told else now_s] * change)
        self._looked_s = now_s
        for _ in range(min(-change, len(self._asked_s))):
            self._asked_s.pop()

    def _note_serving(self, serving: Sequence[str], now_s: float) -> None:
        for replica in serving:
            if replica not in self._since_s:
                self._since_s[replica] = now_s
                asked_s = self._asked_s.popleft() if self._asked_s else None
                if asked_s is not None:
                    self._startups_s.append(now_s - asked_s)
        for gone in self._since_s.keys() - set(serving):
            del self._since_s[gone]
            self._newest.pop(gone, None)

    def _sample(self, replica: str, raw: Raw, now_s: float) -> ReplicaSample | None:
        last = {
            name: values[-1]
            for name, by_replica in raw.items()
            if name in _FIELDS and (values := by_replica.get(replica))
        }
        if not last:
            return None
        measured_s = max(point.timestamp for point in last.values())
        known_s, at_s = self._newest.get(replica, (-1.0, now_s))
        if measured_s != known_s:
            at_s = now_s
            self._newest[replica] = measured_s, at_s
        known = {name: float(point.value) for name, point in last.items() if point.timestamp == measured_s}
        if self._startups_s:
            known["startup_s"] = max(self._startups_s)
        return ReplicaSample(at_s, **known)

"""How many fully used replicas' worth of work comes in, from noisy signals; and how much it may grow. Pure."""

from __future__ import annotations

import math
from collections import deque

from autoscaling.base import WINDOW_S, Signals

_RISE_TAU_S, _FALL_TAU_S = 10.0, 30.0
_WORK_TAU_S = 180.0
_SETTLE_S = 2 * WINDOW_S  # after a queue, until the work of what was in it is out of the signals
_SIGNIFICANT = 3.0  # standard deviations that make a rise one
_BUCKET_S = 5.0
_STANDS_S = 5.0  # one long prompt is no queue
_ALIKE = 0.25
_ENOUGH = 20.0  # requests, to know the work of one
_FORESIGHT = 2  # horizons: a rise takes its time, and is only seen when it has begun
_MOMENTS = 12  # alike, to know what follows them


class Level:
    """A mean over half a minute that follows rises sooner, and significant ones at once.

    `value` is of events at `rate` per second counted over WINDOW_S: their noise is that of a Poisson count.
    """

    def __init__(self) -> None:
        self._level: float | None = None
        self._last_s = 0.0

    def update(self, value: float, rate: float, now_s: float) -> float:
        """The level after `value` was seen at `now_s`. `rate`: events per second behind the value, for its noise."""
        if self._level is None:
            self._level = value
        else:
            tau_s = _RISE_TAU_S if value > self._level else _FALL_TAU_S
            share = 1.0 - math.exp(-(now_s - self._last_s) / tau_s)
            noise = self._level * _SIGNIFICANT / math.sqrt(max(1.0, rate * WINDOW_S))
            rises = value > self._level + noise
            self._level = value if rises else self._level + share * (value - self._level)
        self._last_s = now_s
        return self._level


class Demand:
    """Work per second of the whole pool, in replicas. Two views, the larger counts: the utilisation seen, which says
    no more than what the serving replicas can do; and the arrival rate times the work of a request, which sees a surge
    in full at once. While a queue is worked off, utilisation is of the past's demand and does not count; while one
    stands and does not get shorter, the replicas there are do not suffice."""

    def __init__(self) -> None:
        self._seen = Level()
        self._arrivals = Level()
        self._work = 0.0
        self._requests = 0.0
        self._last_s: float | None = None
        self._queued_s = -math.inf
        self._backlogs: deque[tuple[float, float]] = deque()

    def update(self, signals: Signals, now_s: float, allowed_backlog_s: float) -> float | None:
        """`allowed_backlog_s`: no more than that is no queue. None: nothing is known."""
        rate, seen, backlog_s = signals.arrival_rate, signals.utilisation, signals.backlog_s or 0.0
        elapsed = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        full = self._is_full(backlog_s, allowed_backlog_s, now_s)
        if seen is None:
            return float(signals.serving) if full else None
        calm = now_s - self._queued_s > _SETTLE_S
        known = self._requests >= _ENOUGH and rate is not None
        level = self._seen.update(seen, rate or 0.0, now_s) if calm or full or not known else 0.0
        if full:
            level = max(level, float(signals.serving))
        if rate is None:
            return level
        arrivals = self._arrivals.update(rate, rate, now_s)
        keep = math.exp(-elapsed / _WORK_TAU_S)
        self._work = self._work * keep + seen * elapsed
        self._requests = self._requests * keep + rate * elapsed
        # What waits has arrived, and its work is still to be seen.
        return max(level, arrivals * (self._work + backlog_s) / self._requests) if known else level

    def _is_full(self, backlog_s: float, allowed_s: float, now_s: float) -> bool:
        """Whether a queue has stood for a while and is no shorter than it was."""
        if backlog_s <= allowed_s:
            self._backlogs.clear()
            return False
        self._queued_s = now_s
        self._backlogs.append((now_s, backlog_s))
        while len(self._backlogs) > 1 and self._backlogs[1][0] <= now_s - _STANDS_S:
            self._backlogs.popleft()
        then_s, then_backlog_s = self._backlogs[0]
        return now_s - then_s >= _STANDS_S and backlog_s >= then_backlog_s


class Growth:
    """By how much demand may rise within a horizon: by its present trend, and as it rose after moments like this one.

    A moment of the last `window_s` is like this one when its demand was within `_ALIKE` of the present. Of the highest
    demands within two horizons after each, the `quantile` counts. So a pool that knows bursts can keep room for one
    between them, and none for a second on top of the first.
    """

    def __init__(self, window_s: float, quantile: float) -> None:
        self._quantile = quantile
        self._past: deque[tuple[float, float]] = deque(maxlen=max(2, int(window_s / _BUCKET_S)))  # demand, peak after
        self._recent: deque[float] = deque()
        self._bucket = -1
        self._usual = 0.0

    def update(self, demand: float, horizon_s: float, now_s: float) -> tuple[float, float]:
        """By the trend; as usual. Neither is negative."""
        lag = max(1, round(horizon_s / _BUCKET_S))
        bucket = int(now_s / _BUCKET_S)
        if bucket != self._bucket:
            self._bucket = bucket
            self._recent.append(demand)
            while len(self._recent) > _FORESIGHT * lag:
                peak = max(self._recent)
                self._past.append((self._recent.popleft(), peak))
            self._usual = self._usual_rise(demand)
        return max(0.0, self._trend(demand, lag)), max(0.0, self._usual)

    def _usual_rise(self, demand: float) -> float:
        low, high = demand * (1 - _ALIKE), demand * (1 + _ALIKE)
        peaks = sorted(peak for then, peak in self._past if low <= then <= high)
        if len(peaks) < _MOMENTS:
            return 0.0
        return peaks[min(len(peaks) - 1, int(self._quantile * len(peaks)))] - demand

    def _trend(self, demand: float, lag: int) -> float:
        """The rise over the last horizon, once more. Noise is not in it: a level rises by what is significant."""
        return demand - self._recent[-lag] if len(self._recent) >= lag else 0.0

"""What the plots show. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from load_tests.outcome import Outcome
from load_tests.stats import Seconds

Points = list[tuple[float, float | None]]

_MAX_BINS = 60
_WIDTHS_S = (0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)
_CDF_POINTS = 200


@dataclass(frozen=True, slots=True)
class Bins:
    """Equal pieces of the time from `start` on; x values are seconds from there."""

    start: float
    width_s: float
    count: int

    def index(self, at: float) -> int:
        return min(self.count - 1, max(0, int((at - self.start) / self.width_s)))

    def points(self, values: Sequence[float | None]) -> Points:
        """A value in the middle of each piece."""
        return [((i + 0.5) * self.width_s, value) for i, value in enumerate(values)]

    def steps(self, values: Sequence[float]) -> Points:
        """A value that holds for each piece."""
        return [(i * self.width_s, value) for i, value in enumerate([*values, values[-1]])]


def bins_over(outcomes: Sequence[Outcome], start: float) -> Bins:
    duration = max((o.end for o in outcomes), default=start) - start
    width = next((w for w in _WIDTHS_S if duration / w <= _MAX_BINS), max(duration / _MAX_BINS, _WIDTHS_S[-1]))
    return Bins(start, width, max(1, int(np.ceil(duration / width))))


def percentile_over_time(
    outcomes: Sequence[Outcome], bins: Bins, value: Callable[[Outcome], float | None], p: float
) -> Points:
    """By the time at which requests were due; milliseconds. Empty pieces are None."""
    groups: list[list[float]] = [[] for _ in range(bins.count)]
    for o in outcomes:
        if o.error is None and (v := value(o)) is not None:
            groups[bins.index(o.due)].append(v * 1000)
    return bins.points([float(np.percentile(group, p)) if group else None for group in groups])


def rate(times: Sequence[float], bins: Bins) -> Points:
    """Events per second."""
    counts = [0] * bins.count
    for at in times:
        counts[bins.index(at)] += 1
    return bins.steps([c / bins.width_s for c in counts])


def output_rate(outcomes: Sequence[Outcome], bins: Bins) -> Points:
    """Output tokens per second as they came, each event with an equal part of its request's."""
    counts = np.zeros(bins.count)
    for o in outcomes:
        if o.events:
            at = ((np.frombuffer(o.events) - bins.start) / bins.width_s).astype(int).clip(0, bins.count - 1)
            np.add.at(counts, at, o.tokens / len(o.events))
    return bins.steps([float(c) / bins.width_s for c in counts])


def under_way(outcomes: Sequence[Outcome], bins: Bins) -> Points:
    """Requests due and not ended, at the middle of each piece."""
    due, end = np.sort([o.due for o in outcomes]), np.sort([o.end for o in outcomes])
    middles = bins.start + (np.arange(bins.count) + 0.5) * bins.width_s
    open_now = np.searchsorted(due, middles, "right") - np.searchsorted(end, middles, "right")
    return bins.points([float(n) for n in open_now])


def cdf(seconds: Seconds) -> Points:
    """(milliseconds, share of samples at most so long)."""
    if not len(seconds):
        return []
    shares = np.linspace(0, 1, min(_CDF_POINTS, max(2, len(seconds))))
    return [(float(ms), float(share)) for ms, share in zip(np.quantile(seconds * 1000, shares), shares, strict=True)]

"""What the plots show, as arrays. Times are seconds from the start of the run; pieces of time are given by their
bounds, `edges`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from load_tests.outcome import RequestOutcome

Array = NDArray[np.float64]

_MAX_PIECES = 60  # more would make each too short to hold enough requests for its percentiles
_WIDTHS_S = (0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)
_CDF_POINTS = 200


def edges_over(duration_s: float) -> Array:
    """The bounds of equal pieces that cover the duration, each a round number of seconds long."""
    width = next((w for w in _WIDTHS_S if duration_s / w <= _MAX_PIECES), max(duration_s / _MAX_PIECES, _WIDTHS_S[-1]))
    return np.array([i * width for i in range(max(1, int(np.ceil(duration_s / width))) + 1)], dtype=np.float64)


def percentiles(at_s: Sequence[float], values: Sequence[float], edges: Array, ps: Sequence[float]) -> list[Array]:
    """Of the values that belong to each piece of time, one array for each of `ps`; NaN for an empty piece."""
    which = np.clip(np.searchsorted(edges, at_s, "right") - 1, 0, len(edges) - 2)
    groups = [np.asarray(values)[which == i] for i in range(len(edges) - 1)]
    return list(np.array([np.percentile(g, ps) if len(g) else np.full(len(ps), np.nan) for g in groups]).T)


def rate(at_s: ArrayLike, edges: Array, weights: ArrayLike | None = None) -> Array:
    """Events, or their weights, per second of each piece."""
    inside = np.clip(at_s, edges[0], edges[-1])
    return np.histogram(inside, edges, weights=weights)[0] / np.diff(edges)


def output_rate(outcomes: Sequence[RequestOutcome], start: float, edges: Array) -> Array:
    """Output tokens per second as they came, each event with an equal part of its request's."""
    streamed = [o for o in outcomes if o.events]
    events = np.concatenate([np.frombuffer(o.events) for o in streamed]) - start if streamed else np.empty(0)
    weights = np.repeat([o.tokens / len(o.events) for o in streamed], [len(o.events) for o in streamed])
    return rate(events, edges, weights)


def under_way(due_s: Sequence[float], end_s: Sequence[float], edges: Array) -> Array:
    """Requests due and not ended, at the middle of each piece."""
    middles = (edges[:-1] + edges[1:]) / 2
    return np.searchsorted(np.sort(due_s), middles, "right") - np.searchsorted(np.sort(end_s), middles, "right") * 1.0


def cdf(seconds: Array) -> tuple[Array, Array]:
    """Milliseconds, and the share of samples that took at most so long."""
    if not len(seconds):
        return np.empty(0), np.empty(0)
    shares = np.linspace(0, 1, min(_CDF_POINTS, max(2, len(seconds))))
    return np.quantile(seconds * 1000, shares), shares

"""The course of several simulations of one trace, one below the other: arrivals, replicas, backlog, TTFT."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autoscaling.report.figure import COLOURS
from autoscaling.simulator.run import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS = 600  # of a curve


def draw(outcomes: Sequence[tuple[str, Outcome]], ttft_slo_s: float) -> Figure:
    """`outcomes` with their labels; all of the same trace. Uses no display and no global state."""
    from matplotlib.figure import Figure

    trace = outcomes[0][1].trace
    unit_s, unit = (3600.0, "hours") if trace.duration_s >= 7200 else (60.0, "minutes")
    edges = np.linspace(0.0, trace.duration_s, min(_POINTS, max(10, int(trace.duration_s / 5))) + 1)
    middles = (edges[:-1] + edges[1:]) / 2 / unit_s
    figure = Figure(figsize=(9, 9), layout="constrained")
    arrivals, replicas, backlog, ttft = figure.subplots(4, 1, sharex=True)
    rate = np.histogram(trace.at_s, edges)[0] / np.diff(edges)
    arrivals.fill_between(middles, rate, color="#999999", linewidth=0)
    arrivals.set_ylabel("requests/s")
    arrivals.set_title("; ".join((trace.name, *trace.notes)), fontsize=9, loc="left")
    for i, (label, outcome) in enumerate(outcomes):
        look: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linewidth": 1.2, "label": label}
        line = outcome.timeline
        replicas.step(*_thin(line.at_s / unit_s, line.serving), where="post", **look)
        backlog.plot(*_peaks(line.at_s, line.backlog_s / np.maximum(line.serving, 1), edges, unit_s), **look)
        ttft.plot(middles, _p95(trace.at_s, outcome.ttft_s, edges), **look)
    replicas.set_ylabel("serving replicas")
    replicas.legend(fontsize=8, frameon=False)
    backlog.set_ylabel("backlog,\ns per replica")
    backlog.set_yscale("symlog", linthresh=1.0)
    ttft.axhline(ttft_slo_s, color="#444444", linestyle="--", linewidth=0.8)
    ttft.set_ylabel("TTFT p95, s\n(dashed: SLO)")
    ttft.set_yscale("log")
    ttft.set_xlabel(unit)
    for axes in (arrivals, replicas, backlog, ttft):
        axes.set_xlim(0, trace.duration_s / unit_s)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (arrivals, replicas, backlog):
        axes.set_ylim(bottom=0)
    return figure


Array = NDArray[np.float64]


def _thin(x: Array, y: Array) -> tuple[Array, Array]:
    """Only where the value changes, and the ends."""
    keep = np.concatenate([[True], y[1:] != y[:-1]])
    keep[-1] = True
    return x[keep], y[keep]


def _peaks(at_s: Array, y: Array, edges: Array, unit_s: float) -> tuple[Array, Array]:
    which = np.clip(np.searchsorted(edges, at_s, side="right") - 1, 0, len(edges) - 2)
    peaks = np.full(len(edges) - 1, np.nan)
    np.fmax.at(peaks, which, y)
    return (edges[:-1] + edges[1:]) / 2 / unit_s, peaks


def _p95(at_s: Array, ttft_s: Array, edges: Array) -> Array:
    """By time of arrival; NaN, a gap, where nothing came or nothing was answered."""
    bounds = np.searchsorted(at_s, edges)
    out = np.full(len(edges) - 1, np.nan)
    for i, (low, high) in enumerate(pairwise(bounds)):
        got = ttft_s[low:high]
        got = got[~np.isnan(got)]
        if len(got):
            out[i] = np.quantile(got, 0.95)
    return out

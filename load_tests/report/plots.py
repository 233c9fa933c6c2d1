"""The plots of a run, as matplotlib figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from autoscaling.report.figure import COLOURS
from load_tests.outcome import RequestOutcome
from load_tests.report.result import measured
from load_tests.report.series import Array, cdf, edges_over, output_rate, percentiles, rate, under_way
from load_tests.runner import Run
from load_tests.stats import gaps, ttfts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INCHES = (6.4, 3.2)
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Line:
    """A NaN in `y` breaks the line. With one `x` more than there are `y`, each `y` holds from one `x` to the next."""

    name: str
    x: Array
    y: Array


@dataclass(frozen=True, slots=True)
class Mark:
    """A thin labelled line across the chart: at an x value, or at a y value when `level`."""

    at: float
    label: str
    level: bool = False


def chart(
    title: str, x_label: str, y_label: str, lines: Sequence[Line], marks: Sequence[Mark] = (), *, log_x: bool = False
) -> Figure:
    """Uses no display and no global state. On a logarithmic axis, values at or below zero are left out."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set(xlabel=x_label, ylabel=y_label)
    shown = [line.x[: len(line.y)][np.isfinite(line.y)] for line in lines]
    if log_x and any((x > 0).any() for x in shown):
        axes.set_xscale("log", nonpositive="mask")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    for line, colour in zip(lines, cycle(COLOURS), strict=False):
        if len(line.x) > len(line.y):
            axes.stairs(line.y, line.x, baseline=None, color=colour, label=line.name)
        else:
            axes.plot(line.x, line.y, color=colour, label=line.name, linewidth=1.2, marker=".", markersize=3)
    for mark in marks:
        draw = axes.axhline if mark.level else axes.axvline
        draw(mark.at, color="#444444", linestyle="--", linewidth=0.8)
        where = (1.0, mark.at) if mark.level else (mark.at, 1.0)
        axes.annotate(
            mark.label,
            where,
            xycoords=("axes fraction", "data") if mark.level else ("data", "axes fraction"),
            fontsize=8,
            ha="right" if mark.level else "left",
            va="bottom" if mark.level else "top",
            rotation="horizontal" if mark.level else "vertical",
            annotation_clip=True,
            parse_math=False,  # names are the user's, and may have a dollar sign
        )
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.spines[["top", "right"]].set_visible(False)
    if not any(len(x) for x in shown):
        axes.text(0.5, 0.5, "nothing to show", transform=axes.transAxes, ha="center")
    for text in axes.legend(fontsize=8, frameon=False).get_texts():
        text.set_parse_math(False)
    return figure


def plots(run: Run) -> list[Figure]:
    """Eight: latencies over time and as distributions, then the load and what came of it over time."""
    outcomes, slo = run.outcomes, run.scenario.slo
    start = run.phases[0].start if run.phases else 0.0
    due_s, end_s = [o.due - start for o in outcomes], [o.end - start for o in outcomes]
    edges = edges_over(max(end_s, default=0.0))
    middles = (edges[:-1] + edges[1:]) / 2
    phases = [Mark(phase.start - start, phase.name) for phase in run.phases] if len(run.phases) > 1 else []
    good = [o for o in measured(run) if o.error is None]

    def latency(name: str, limit_ms: float | None, value: Callable[[RequestOutcome], float | None]) -> Figure:
        seen = [(o.due - start, v * 1000) for o in outcomes if o.error is None and (v := value(o)) is not None]
        found = percentiles([at for at, _ in seen], [ms for _, ms in seen], edges, _PERCENTILES)
        lines = [Line(f"p{p}", middles, y) for p, y in zip(_PERCENTILES, found, strict=True)]
        title = f"{name}, by when requests were due, each {edges[1]:g} s"
        return over_time(title, "ms", lines, _slo(limit_ms, level=True))

    def share(name: str, of: str, seconds: Array, limit_ms: float | None) -> Figure:
        figure = chart(
            f"{name}, share of {of}",
            "ms",
            "share at most so long",
            [Line(name.lower(), *cdf(seconds))],
            _slo(limit_ms, level=False),
            log_x=True,
        )
        figure.axes[0].set_ylim(0, 1)
        return figure

    def over_time(title: str, y_label: str, lines: Sequence[Line], marks: Sequence[Mark] = ()) -> Figure:
        figure = chart(title, "seconds from the start", y_label, lines, [*phases, *marks])
        figure.axes[0].set_xlim(0, edges[-1])
        return figure

    ttft_ms, itl_ms = (slo.ttft_ms, slo.itl_ms) if slo else (None, None)
    kinds = sorted({o.error for o in outcomes if o.error is not None})
    failed = {kind: [o.end - start for o in outcomes if o.error == kind] for kind in kinds} or {"none": []}
    return [
        latency("TTFT", ttft_ms, lambda o: o.ttft_s),
        latency("TPOT", itl_ms, lambda o: o.tpot_s),
        share("TTFT", "requests", ttfts(good), ttft_ms),
        share("ITL", "gaps", gaps(good), itl_ms),
        over_time(
            "Arrivals and completions",
            "requests per second",
            [Line("due", edges, rate(due_s, edges)), Line("ended", edges, rate(end_s, edges))],
        ),
        over_time("Requests under way", "requests", [Line("due, not ended", middles, under_way(due_s, end_s, edges))]),
        over_time("Output tokens", "per second", [Line("received", edges, output_rate(outcomes, start, edges))]),
        over_time("Errors", "per second", [Line(kind, edges, rate(at_s, edges)) for kind, at_s in failed.items()]),
    ]


def _slo(limit_ms: float | None, level: bool) -> list[Mark]:
    return [] if limit_ms is None else [Mark(limit_ms, "SLO", level)]

"""The plots of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from load_tests.outcome import Outcome
from load_tests.report.result import measured
from load_tests.report.series import Bins, bins_over, cdf, output_rate, percentile_over_time, rate, under_way
from load_tests.report.svg import Axis, Mark, Series, chart
from load_tests.runner import Run
from load_tests.stats import gaps, ttfts

_SHARE = Axis("share at most so long", low=0.0, high=1.0)
_MS = Axis("ms", log=True)


def plots(run: Run) -> list[str]:
    outcomes = run.outcomes
    start = run.phases[0].start if run.phases else 0.0
    bins = bins_over(outcomes, start)
    time = Axis("seconds from the start", low=0.0, high=bins.width_s * bins.count)
    phases = [Mark(phase.start - start, phase.name) for phase in run.phases] if len(run.phases) > 1 else []
    slo = run.scenario.slo
    ttft_limit = _limit(slo.ttft_ms if slo else None)
    itl_limit = _limit(slo.itl_ms if slo else None)
    each = f"by when requests were due, each {bins.width_s:g} s"
    good = [o for o in measured(run) if o.error is None]
    return [
        chart(f"TTFT, {each}", time, Axis("ms"), _latency(outcomes, bins, lambda o: o.ttft_s), phases + ttft_limit),
        chart(f"TPOT, {each}", time, Axis("ms"), _latency(outcomes, bins, lambda o: o.tpot_s), phases + itl_limit),
        chart("TTFT, share of requests", _MS, _SHARE, [Series("ttft", cdf(ttfts(good)))], _upright(ttft_limit)),
        chart("ITL, share of gaps", _MS, _SHARE, [Series("itl", cdf(gaps(good)))], _upright(itl_limit)),
        chart(
            "Arrivals and completions",
            time,
            Axis("requests per second"),
            [
                Series("due", rate([o.due for o in outcomes], bins), step=True),
                Series("ended", rate([o.end for o in outcomes], bins), step=True),
            ],
            phases,
        ),
        chart(
            "Requests under way", time, Axis("requests"), [Series("due, not ended", under_way(outcomes, bins))], phases
        ),
        chart(
            "Output tokens", time, Axis("per second"), [Series("received", output_rate(outcomes, bins), True)], phases
        ),
        chart("Errors", time, Axis("per second"), _errors(outcomes, bins), phases),
    ]


def _latency(outcomes: Sequence[Outcome], bins: Bins, value: Callable[[Outcome], float | None]) -> list[Series]:
    return [Series(f"p{p}", percentile_over_time(outcomes, bins, value, p)) for p in (50, 90, 99)]


def _errors(outcomes: Sequence[Outcome], bins: Bins) -> list[Series]:
    kinds = sorted({o.error for o in outcomes if o.error is not None})
    if not kinds:
        return [Series("none", bins.steps([0.0] * bins.count), step=True)]
    return [Series(kind, rate([o.end for o in outcomes if o.error == kind], bins), step=True) for kind in kinds]


def _limit(ms: float | None) -> list[Mark]:
    return [] if ms is None else [Mark(ms, "SLO", level=True)]


def _upright(marks: Sequence[Mark]) -> list[Mark]:
    return [Mark(mark.at, mark.label) for mark in marks]

"""A run as one HTML page that needs nothing else: numbers, plots, and the scenario that gave them."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape

import yaml

from autoscaling.report.figure import as_svg
from autoscaling.report.page import page, table
from load_tests.report.plots import plots
from load_tests.report.result import Result, cpu_us_per_token
from load_tests.report.summary import LATENCY_HEADS, latency_rows
from load_tests.runner import Run
from load_tests.stats import Summary

_PHASE_HEADS = ("", "requests", "failed", "seconds", "requests/s", "output tokens/s", "in SLO")
_PHASE_LATENCIES = [(metric, p) for metric in ("ttft", "itl", "e2e") for p in ("p50", "p99")]


def html(run: Run, result: Result) -> str:
    """Raises ModuleNotFoundError without matplotlib."""
    figures = "".join(as_svg(figure) for figure in plots(run))
    overview = f'{_about(run, result)}{_cards(result.total)}<div class="figures">{figures}</div>'
    phases = dict(result.phases)
    if len(phases) > 1:
        phases["measured phases"] = result.total
    scenario = yaml.safe_dump(run.scenario.model_dump(mode="json", exclude_none=True), sort_keys=False)
    sections = [
        ("", overview),
        ("Latency, ms", table(LATENCY_HEADS, latency_rows(result.total))),
        (
            "Phases",
            table(
                (*_PHASE_HEADS, *(f"{metric} {p}" for metric, p in _PHASE_LATENCIES)),
                (_phase_row(name, summary) for name, summary in phases.items()),
            ),
        ),
    ]
    if errors := sorted(result.total.errors.items(), key=lambda item: -item[1]):
        sections.append(("Errors", table(("kind", "requests"), ((kind, str(count)) for kind, count in errors))))
    return page(f"{run.scenario.name}: load test", [*sections, ("Scenario", f"<pre>{escape(scenario)}</pre>")])


def _about(run: Run, result: Result) -> str:
    when = datetime.fromtimestamp(run.started_at, UTC)
    text = (
        f"{run.model} at {run.base_url}, {when:%Y-%m-%d %H:%M:%S} UTC. Prompts are {run.form.unit}s, "
        f"{'exactly' if run.form.exact else 'about'} as long as asked for. The generator spent {run.cpu_s:.2f} s of "
        f"CPU time, {cpu_us_per_token(run):.0f} µs a token; requests left "
        f"{_number(result.total.send_lag_ms.get('p99'))} ms late at most, 99 % of the time."
    )
    return f"<p>{escape(text)}</p>"


def _cards(s: Summary) -> str:
    ttft, itl = s.latency_ms.get("ttft", {}), s.latency_ms.get("itl", {})
    cards = [
        (f"{s.succeeded} / {s.requests}", "requests answered"),
        (f"{s.output_tokens_per_s:,.0f}", "output tokens/s"),
        (f"{s.requests_per_s:.2f}", "requests/s"),
        (f"{_number(ttft.get('p50'))} / {_number(ttft.get('p99'))}", "TTFT p50 / p99, ms"),
        (f"{_number(itl.get('p50'))} / {_number(itl.get('p99'))}", "ITL p50 / p99, ms"),
    ]
    if s.goodput is not None:
        cards.append((f"{s.goodput.share:.1%}", f"within the SLO: {s.goodput.requests_per_s:.2f} requests/s"))
    if s.cached_tokens:
        cards.append((f"{s.cached_tokens / max(1, s.prompt_tokens):.0%}", "of prompt tokens from the cache"))
    body = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in cards
    )
    return f'<div class="cards">{body}</div>'


def _phase_row(name: str, s: Summary) -> list[str]:
    return [
        name,
        str(s.requests),
        str(s.requests - s.succeeded),
        f"{s.duration_s:,.1f}",
        f"{s.requests_per_s:.2f}",
        f"{s.output_tokens_per_s:,.1f}",
        f"{s.goodput.share:.1%}" if s.goodput is not None else "-",
        *(f"{s.latency_ms[metric][p]:,.1f}" if metric in s.latency_ms else "-" for metric, p in _PHASE_LATENCIES),
    ]


def _number(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:,.0f}" if ms >= 10 else f"{ms:.1f}"

"""A run as one HTML page that needs nothing else: numbers, plots, and the scenario that gave them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape

import yaml

from load_tests.report.plots import plots
from load_tests.report.result import Result, cpu_us_per_token
from load_tests.report.table import COLUMNS
from load_tests.runner import Run
from load_tests.stats import Summary

_STYLE = """
:root { color-scheme: light dark; --fg: #1c1e21; --dim: #666b73; --bg: #fff; --line: #dfe2e6; --card: #f6f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --fg: #e4e6ea; --dim: #9aa0a8; --bg: #16181b; --line: #33373d; --card: #1f2226; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); margin: 2rem auto;
  max-width: 1360px; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; } p { color: var(--dim); margin: 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .75rem; margin: 1.25rem 0; }
.card { background: var(--card); border-radius: 8px; padding: .7rem .9rem; }
.card b { display: block; font-size: 1.35rem; } .card span { color: var(--dim); font-size: .82rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)); gap: 1.25rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; fill: var(--fg); } .dim { fill: var(--dim); } .grid { stroke: var(--line); }
.axis { stroke: var(--dim); } .mark { stroke: var(--dim); stroke-dasharray: 4 3; }
pre { background: var(--card); padding: 1rem; overflow-x: auto; border-radius: 8px; font-size: 13px; }
"""


def html(run: Run, result: Result) -> str:
    name, when = run.scenario.name, datetime.fromtimestamp(run.started_at, UTC)
    scenario = yaml.safe_dump(run.scenario.model_dump(mode="json", exclude_none=True), sort_keys=False)
    exact = "exactly" if run.form.exact else "about"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(name)}: load test</title><style>{_STYLE}</style></head><body>
<h1>{escape(name)}</h1>
<p>{escape(run.model)} at {escape(run.base_url)}, {when:%Y-%m-%d %H:%M:%S} UTC. Prompts are {run.form.unit}s,
{exact} as long as asked for. The generator spent {run.cpu_s:.2f} s of CPU time, {cpu_us_per_token(run):.0f} µs a
token; requests left {_number(result.total.send_lag_ms.get("p99"))} ms late at most, 99 % of the time.</p>
{_cards(result.total)}
<div class="plots">{"".join(plots(run))}</div>
<h2>Latency, ms</h2>
{_latency_table(result.total)}
<h2>Phases</h2>
{_phase_table(result)}
{_error_table(result.total)}
<h2>Scenario</h2>
<pre>{escape(scenario)}</pre>
</body></html>
"""


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


def _latency_table(s: Summary) -> str:
    rows = [[name, *(f"{row[c]:,.1f}" for c in COLUMNS)] for name, row in s.latency_ms.items()]
    return _table(["", *COLUMNS], rows)


def _phase_table(result: Result) -> str:
    columns = ["", "requests", "failed", "seconds", "requests/s", "output tokens/s", "in SLO"]
    columns += ["ttft p50", "ttft p99", "itl p50", "itl p99", "e2e p50", "e2e p99"]
    rows = [_phase_row(name, s) for name, s in result.phases.items()]
    if len(rows) > 1:
        rows.append(_phase_row("measured phases", result.total))
    return _table(columns, rows)


def _phase_row(name: str, s: Summary) -> list[str]:
    latency = [
        f"{s.latency_ms[metric][p]:,.1f}" if metric in s.latency_ms else "-"
        for metric in ("ttft", "itl", "e2e")
        for p in ("p50", "p99")
    ]
    slo = f"{s.goodput.share:.1%}" if s.goodput is not None else "-"
    return [
        name,
        str(s.requests),
        str(s.requests - s.succeeded),
        f"{s.duration_s:,.1f}",
        f"{s.requests_per_s:.2f}",
        f"{s.output_tokens_per_s:,.1f}",
        slo,
        *latency,
    ]


def _error_table(s: Summary) -> str:
    if not s.errors:
        return ""
    rows = [[kind, str(count)] for kind, count in sorted(s.errors.items(), key=lambda item: -item[1])]
    return "<h2>Errors</h2>" + _table(["kind", "requests"], rows)


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _number(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:,.0f}" if ms >= 10 else f"{ms:.1f}"

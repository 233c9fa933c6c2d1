"""One HTML file that needs nothing else: table, curves, the changes of each policy with their reasons."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from autoscaling.base import Decision
from autoscaling.report.summary import HEADS, Summary, cells
from autoscaling.simulator.run import Outcome

_CHANGES = 200  # of one policy that are listed
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
td, th { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; font-weight: normal }
th { color: #666 } td:first-child, th:first-child { text-align: left } svg { width: 100%; height: auto }
summary { cursor: pointer } td.why { text-align: left }
"""


def page(
    title: str, facts: Sequence[str], summaries: Sequence[Summary], outcomes: Sequence[tuple[str, Outcome]], svg: str
) -> str:
    """`facts`: one line each about traffic and set-up."""
    heads = "".join(f"<th>{escape(h)}</th>" for h in HEADS)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in cells(s))}</tr>" for s in summaries)
    changes = "".join(_changes(label, outcome) for label, outcome in outcomes)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style>\n<h1>{escape(title)}</h1>\n"
        f"<ul>{''.join(f'<li>{escape(fact)}</li>' for fact in facts)}</ul>\n"
        f"<table><tr>{heads}</tr>{rows}</table>\n{svg}\n<h2>Changes</h2>\n{changes}</html>\n"
    )


def _changes(label: str, outcome: Outcome) -> str:
    shown = outcome.events[:_CHANGES]
    rows = "".join(_change(at_s, decision) for at_s, decision in shown)
    more = f"<p>and {len(outcome.events) - len(shown)} more</p>" if len(outcome.events) > len(shown) else ""
    return (
        f"<details><summary>{escape(label)}: {len(outcome.events)} changes, {outcome.faults} faults</summary>"
        f"<table><tr><th>s</th><th>target</th><th>wanted</th><th>why</th><th>limits</th></tr>{rows}</table>"
        f"{more}</details>\n"
    )


def _change(at_s: float, d: Decision) -> str:
    proposed = "-" if d.proposed is None else f"{d.proposed:.2f}"
    terms = ", ".join(f"{name} {value:.2f}" for name, value in d.terms.items())
    why = f"{d.why}{f' ({terms})' if terms else ''}{f'; {d.fault}' if d.fault else ''}"
    return (
        f"<tr><td>{at_s:.0f}</td><td>{d.target}</td><td>{proposed}</td>"
        f'<td class="why">{escape(why)}</td><td class="why">{escape(", ".join(d.limits))}</td></tr>'
    )

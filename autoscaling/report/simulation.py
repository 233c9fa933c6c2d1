"""Simulations of one trace as a page: table, curves, and the changes of each policy with their reasons."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from autoscaling.base import Decision
from autoscaling.report.figure import as_svg
from autoscaling.report.page import bullets, page, table
from autoscaling.report.summary import HEADS, Summary, cells
from autoscaling.simulator.run import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CHANGES = 200  # of one policy that are listed: a day's, and a page that browsers still open at once


def simulation_page(
    trace: str,
    facts: Sequence[str],
    summaries: Sequence[Summary],
    outcomes: Sequence[tuple[str, Outcome]],
    figure: Figure,
) -> str:
    """`facts`: one line each about traffic and set-up. `outcomes` with their labels."""
    numbers = bullets(facts) + table(HEADS, map(cells, summaries)) + as_svg(figure)
    changes = "".join(_changes(label, outcome) for label, outcome in outcomes)
    return page(f"Scaling: {trace}", [("", numbers), ("Changes", changes)])


def _changes(label: str, outcome: Outcome) -> str:
    shown = outcome.events[:_CHANGES]
    rows = table(("s", "target", "wanted", "why", "limits"), [_change(*event) for event in shown], text=(3, 4))
    more = f"<p>and {len(outcome.events) - len(shown)} more</p>" if len(outcome.events) > len(shown) else ""
    about = f"{escape(label)}: {len(outcome.events)} changes, {outcome.faults} faults"
    return f"<details><summary>{about}</summary>{rows}{more}</details>\n"


def _change(at_s: float, d: Decision) -> tuple[str, ...]:
    terms = ", ".join(f"{name} {value:.2f}" for name, value in d.terms.items())
    why = f"{d.why}{f' ({terms})' if terms else ''}{f'; {d.fault}' if d.fault else ''}"
    proposed = "-" if d.proposed is None else f"{d.proposed:.2f}"
    return f"{at_s:.0f}", str(d.target), proposed, why, ", ".join(d.limits)

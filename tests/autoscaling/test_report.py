"""What is shown of simulations, and the page, tables and figures that other reports use too."""

from __future__ import annotations

import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from autoscaling.base import Decision
from autoscaling.report.figure import as_png, as_svg
from autoscaling.report.page import bullets, page, table
from autoscaling.report.plots import draw
from autoscaling.report.simulation import simulation_page
from autoscaling.report.summary import summarise
from autoscaling.report.tables import markdown_table, text_table
from autoscaling.simulator.run import Outcome, Timeline
from autoscaling.traces.trace import Trace


def test_a_page_stands_alone_and_escapes_what_it_is_given() -> None:
    html = page("a < b", [("", bullets(["<i>"])), ("1 & 2", table(("x",), [("</td>",)]))])
    assert html.startswith("<!doctype html>") and html.endswith("</html>\n")
    assert "<h1>a &lt; b</h1>" in html and "<h2>1 &amp; 2</h2>" in html
    assert "<li>&lt;i&gt;</li>" in html and "<td>&lt;/td&gt;</td>" in html
    assert html.count("<h2>") == 1 and "<script" not in html and "http" not in html


def test_columns_of_text_are_marked() -> None:
    assert table(("a", "why"), [("1", "x")], text=(1,)).endswith(
        '<tr><td>1</td><td class="text">x</td></tr></table></div>'
    )


def figure() -> Figure:
    drawn = Figure(figsize=(2, 1))
    drawn.subplots().plot([0, 1], [0, 1], label="line")
    return drawn


@pytest.mark.slow
def test_the_same_figure_is_the_same_svg() -> None:
    assert as_svg(figure()) == as_svg(figure())
    assert as_svg(figure()).startswith("<svg") and as_svg(figure()).rstrip().endswith("</svg>")
    assert as_png(figure()).startswith(b"\x89PNG")


def test_text_tables_keep_every_cell_as_it_is() -> None:
    rows = [("trace:12@0.2 [bold]", "1"), (":smile:", "x" * 200)]
    assert text_table(("name", "n"), rows).splitlines() == [
        f"{'name':<19}  {'n':>200}",
        f"trace:12@0.2 [bold]  {'1':>200}",
        f"{':smile:':<19}  {'x' * 200}",
    ]
    assert markdown_table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"


def outcome(changes: int) -> Outcome:
    """Of a minute with one request a second, of which the last got no first token."""
    at_s = np.arange(60.0)
    tokens = np.full(60, 10)
    ttft_s = np.where(at_s < 59, 0.25, np.nan)
    trace = Trace("t", at_s, tokens, tokens, 60.0, ("made by hand",))
    decision = Decision(2, 1.5, "work", ("max_up",), "a <fault>", {"demand": 1.25})
    timeline = Timeline(*np.array([(float(s), 1.0, 1.0, 1.0, 0.0, 0.0) for s in range(60)]).T)
    return Outcome(trace, ttft_s, 0, 3600.0, ((7.0, decision),) * changes, 1, timeline)


def test_a_simulation_as_a_page_lists_changes_with_their_reasons_and_counts_the_rest() -> None:
    many = outcome(203)
    summary = summarise("slo", many, 1.0)
    assert (summary.slo_attainment, summary.replica_hours, summary.scale_events) == (59 / 60, 1.0, 203)
    html = simulation_page("t", ["a fact"], [summary], [("slo", many)], draw([("slo", many)], 1.0))
    assert "<title>Scaling: t</title>" in html and "<li>a fact</li>" in html and html.count("<svg") == 1
    assert "slo: 203 changes, 1 faults" in html and "<p>and 3 more</p>" in html
    why = "work (demand 1.25); a &lt;fault&gt;"
    row = f'<tr><td>7</td><td>2</td><td>1.50</td><td class="text">{why}</td><td class="text">max_up</td></tr>'
    assert html.count(row) == 200 and len(re.findall("more</p>", html)) == 1


def test_nobody_answered_is_said_so() -> None:
    silent = outcome(0)
    silent.ttft_s[:] = np.nan
    summary = summarise("slo", silent, 1.0)
    assert (summary.slo_attainment, summary.ttft_p50_s, summary.ttft_p99_s) == (0.0, None, None)

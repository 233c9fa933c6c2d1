"""Reports, from a made-up run; and the command line, against a server in the same process."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from array import array
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers_load import fake_server
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from autoscaling.report.figure import as_svg
from load_tests.__main__ import main
from load_tests.outcome import RequestOutcome
from load_tests.progress import ProgressLine
from load_tests.prompts import Form
from load_tests.report.html import html
from load_tests.report.plots import Line, Mark, chart, plots
from load_tests.report.result import as_json, result_of, rows
from load_tests.report.series import cdf, edges_over, output_rate, percentiles, rate, under_way
from load_tests.runner import PhaseRun, Run
from load_tests.scenario import Scenario
from load_tests.stats import ttfts

FIXED = {"kind": "fixed", "tokens": 8}
PHASE = {"arrivals": {"kind": "poisson", "rate": 2.0}, "prompt": FIXED, "output": FIXED, "requests": 4}
SCENARIO = Scenario.model_validate(
    {
        "name": "<b>&",
        "slo": {"ttft_ms": 150, "itl_ms": 100},
        "phases": [{"name": "warm", **PHASE, "measured": False}, {"name": "steady", **PHASE}],
    }
)


Points = list[tuple[float, float | None]]


def sorted_by_x(points: Points) -> Points:
    return sorted(points, key=lambda xy: xy[0])


def made_up() -> Run:
    outcomes = [
        RequestOutcome(
            due=100.0 + i / 2,
            sent=100.0 + i / 2,
            end=101.0 + i / 2,
            events=array("d", [100.1 + i / 2, 100.2 + i / 2, 101.0 + i / 2]),
            prompt_tokens=8,
            output_tokens=6,
            phase=int(i >= 4),
        )
        for i in range(8)
    ]
    outcomes.append(RequestOutcome(due=104.0, sent=104.0, end=104.5, error="http 429 <i>", phase=1))
    phases = [PhaseRun("warm", False, 100.0, 102.0), PhaseRun("steady", True, 102.0, 105.0)]
    return Run(SCENARIO, "http://h/v1", "m", Form("id", exact=True), 0.0, phases, outcomes, 9, 9, 0.01)


class Tags(HTMLParser):
    """Every tag that opens is closed, and nothing is fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.slow
def test_the_page_stands_alone_and_escapes() -> None:
    run = made_up()
    page = html(run, result_of(run))
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and tags.seen.count("svg") == 8
    assert not {"i", "script", "link", "img"} & set(tags.seen)
    assert "<b>&" not in page and "&lt;b&gt;&amp;" in page and "<i>" not in page


@pytest.mark.slow
def test_plots_are_well_formed_even_of_nothing() -> None:
    empty = made_up()
    empty.outcomes.clear()
    for run in (made_up(), empty):
        for figure in plots(run):
            ElementTree.fromstring(as_svg(figure))
    page = html(empty, result_of(empty))
    assert "nothing to show" in page


def test_results_count_measured_phases_only() -> None:
    run = made_up()
    result = result_of(run)
    assert (result.total.requests, result.total.succeeded, result.phases["warm"].requests) == (5, 4, 4)
    data = json.loads(json.dumps(as_json(run, result)))
    assert data["total"]["goodput"]["share"] == 0.0  # (1.0 - 0.1) / 5 s is above the limit on ITL
    assert data["generator"]["cpu_us_per_token"] == pytest.approx(208.3)
    lines = list(rows(run))
    assert lines[0]["ttft_ms"] == 100 and lines[0]["tpot_ms"] == 180
    assert (lines[-1]["error"], lines[-1]["ttft_ms"], lines[-1]["due_s"]) == ("http 429 <i>", None, 4.0)


def test_series() -> None:
    edges = edges_over(2.5)
    assert edges.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5] and len(edges_over(0.0)) == 2
    assert max(len(edges_over(s)) for s in (29.0, 31.0, 1e4, 1e7)) == 61
    outcomes, edges = made_up().outcomes, np.arange(6.0)
    due_s, end_s = [o.due - 100 for o in outcomes], [o.end - 100 for o in outcomes]
    assert rate(due_s, edges).tolist() == [2, 2, 2, 2, 1]
    assert rate([-1.0, 9.0], edges).tolist() == [1, 0, 0, 0, 1]
    assert under_way(due_s, end_s, edges).tolist() == [2, 2, 2, 2, 0]
    assert output_rate(outcomes, 100.0, edges).sum() == pytest.approx(48)
    assert output_rate([], 100.0, edges).tolist() == [0] * 5
    p50, p99 = percentiles([0.1, 0.2, 3.0], [1.0, 3.0, 5.0], edges, (50, 99))
    assert str(p50.tolist()) == "[2.0, nan, nan, 5.0, nan]" and p99[0] == pytest.approx(2.98)
    ms, shares = cdf(ttfts(o for o in outcomes if o.error is None))
    assert shares[0] == 0 and (ms[-1], shares[-1]) == (pytest.approx(100), 1)


VALUE = st.floats(-1e9, 1e9)


@pytest.mark.slow
@settings(max_examples=30)  # a drawing takes a tenth of a second
@given(st.lists(st.tuples(VALUE, st.none() | VALUE), max_size=8).map(sorted_by_x), st.booleans(), st.booleans(), VALUE)
@example([(0.0, 0.0), (5e-324, 5e-324)], False, False, 5e-324)  # a range that no float divides
@example([(5e-324, 1.0), (1e-323, 2.0)], True, False, 5e-324)
def test_any_chart_is_well_formed(points: Points, log: bool, step: bool, at: float) -> None:
    marks = [Mark(at, "$a"), Mark(at, "b$", level=True)]
    x, y = (np.array(values, dtype=float) for values in zip(*points, strict=True)) if points else (np.empty(0),) * 2
    lines = [Line("$s$", x, y[:-1] if step and len(points) > 1 else y)]
    root = ElementTree.fromstring(as_svg(chart("t", "x", "y", lines, marks, log_x=log)))
    paths = [element.get("d", "") for element in root.iter("{http://www.w3.org/2000/svg}path")]
    assert paths and not any("nan" in path or "inf" in path for path in paths)


def test_progress_counts_what_is_new() -> None:
    line, run = ProgressLine(), made_up()
    first, second = line.text(run), line.text(run)
    assert "9/9 done, 0 under way, 1 failed" in first and first.endswith("ttft 100 ms")
    assert " steady: 9/9 done, 0 under way, 1 failed" in second and second.endswith("ttft 100 ms")


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown_on_terminals_only(terminal: bool) -> None:
    out = io.StringIO()
    line = ProgressLine(Console(file=out, force_terminal=terminal, width=200))
    line(made_up())
    line.clear()
    assert ("9/9 done" in out.getvalue()) is terminal
    assert terminal or not out.getvalue()


@pytest.mark.sockets
@pytest.mark.slow
async def test_command_runs_reports_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\nslo: {ttft_ms: 10000}\nphases:\n"
        "  - {name: a, arrivals: {kind: constant, rate: 200}, prompt: {kind: fixed, tokens: 8},"
        " output: {kind: fixed, tokens: 4}, requests: 6}\n"
        "  - {name: b, arrivals: {kind: closed, concurrency: 2}, prompt: {kind: fixed, tokens: 8},"
        " output: {kind: fixed, tokens: 4}, requests: 4}\n"
    )
    async with fake_server() as server:
        for name in ("one", "two"):
            args = ["run", str(file), "--base-url", server.url, "--api-key", "secret", "--out", str(tmp_path / name)]
            assert await asyncio.to_thread(main, args) == 0
        shown = capsys.readouterr().out
        assert "== b" in shown and "100.0% within the SLO" in shown and "10 ok, 0 failed" in shown
        server.status = 429
        assert await asyncio.to_thread(main, ["run", str(file), "--base-url", server.url, "--model", "m"]) == 1
        assert "10 x http 429 busy" in capsys.readouterr().out
    for path in (tmp_path / "one").iterdir():
        assert "secret" not in path.read_text()
    assert len((tmp_path / "one" / "requests.jsonl").read_text().splitlines()) == 10
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "two" / "result.json")]) == 0
    shown = capsys.readouterr().out
    assert "output tokens/s" in shown and "1.00x" in shown and "\nb  " in shown


@pytest.mark.sockets
async def test_without_matplotlib_only_the_page_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file, out = tmp_path / "mine.yaml", tmp_path / "out"
    file.write_text(
        "name: mine\nphases: [{name: a, arrivals: {kind: closed, concurrency: 1}, prompt: {kind: fixed, tokens: 8},"
        " output: {kind: fixed, tokens: 4}, requests: 1}]\n"
    )
    async with fake_server() as server:
        args = ["run", str(file), "--base-url", server.url, "--out", str(out)]
        assert await asyncio.to_thread(main, args) == 0
    assert {path.name for path in out.iterdir()} == {"result.json", "requests.jsonl"}
    assert "no report.html, which needs matplotlib" in capsys.readouterr().err


@pytest.mark.sockets
def test_mistakes_cost_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "chat", "--base-url", "http://127.0.0.1:9"]) == 2
    assert main(["run", "nowhere"]) == 2
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    (tmp_path / "result.json").write_text("[]")
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4 and all(line.startswith("load_tests: ") for line in errors)

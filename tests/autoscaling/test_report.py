"""What is shown of simulations, and the page, tables and figures that other reports use too."""

from __future__ import annotations

from matplotlib.figure import Figure

from autoscaling.report.figure import as_png, as_svg
from autoscaling.report.page import bullets, page, table
from autoscaling.report.tables import markdown_table, text_table


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

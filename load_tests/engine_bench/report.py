"""Tables as text, Markdown and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from load_tests.engine_bench.base import Figures, MeasuredRow
from load_tests.report.tables import Table, markdown


@dataclass(frozen=True, slots=True)
class EngineReport:
    """`settings`: what was measured and on what, in words."""

    settings: dict[str, str]
    figures: tuple[Figures, ...]


def table(figures: Figures) -> Table:
    rows = [[_cell(row.get(key)) for key in figures.columns] for row in figures.rows]
    return Table(figures.title, list(figures.columns.values()), rows, figures.notes)


def document(report: EngineReport) -> str:
    """In Markdown."""
    settings = "\n".join(f"- {key}: {value}" for key, value in report.settings.items())
    return f"# Engine benchmarks\n\n{settings}\n\n{markdown([table(figures) for figures in report.figures])}"


def as_json(report: EngineReport) -> dict[str, Any]:
    tables = {one.name: asdict(one) | {"rows": [_rounded(row) for row in one.rows]} for one in report.figures}
    return {"settings": report.settings, "tables": tables}


def _rounded(row: MeasuredRow) -> MeasuredRow:
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}


def _cell(value: float | str | None) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"
        case _:
            return str(value)

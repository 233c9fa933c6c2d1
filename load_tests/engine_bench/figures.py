"""What a part gives back, and how it is shown: as a table, in Markdown and in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from load_tests.report.tables import Table, markdown

MeasuredRow = Mapping[str, float | str | None]


@dataclass(frozen=True, slots=True)
class Figures:
    """`columns`: key of a row -> heading, with the unit. A value of None was not measured."""

    name: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[MeasuredRow]
    notes: Sequence[str] = ()


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


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

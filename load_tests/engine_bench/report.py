"""Tables as text, Markdown and JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from load_tests.engine_bench.base import Row, Table


@dataclass(frozen=True, slots=True)
class Report:
    """`settings`: what was measured and on what, in words."""

    settings: dict[str, str]
    tables: tuple[Table, ...]


def text(table: Table) -> str:
    cells = _cells(table)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [table.title]
    for row in cells:
        lines.append("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    return "\n".join([*lines, *(f"  ({note})" for note in table.notes)])


def markdown(report: Report) -> str:
    lines = ["# Engine benchmarks", "", *(f"- {key}: {value}" for key, value in report.settings.items())]
    for table in report.tables:
        head, *rows = _cells(table)
        lines += ["", f"## {table.title}", "", _line(head), _line(["---:"] * len(head)), *map(_line, rows)]
        if table.notes:
            lines += ["", *(f"- {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def as_json(report: Report) -> dict[str, Any]:
    tables = {table.name: asdict(table) | {"rows": [_rounded(row) for row in table.rows]} for table in report.tables}
    return {"settings": report.settings, "tables": tables}


def machine() -> str:
    model = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{len(os.sched_getaffinity(0))} cores, {model}"


def _rounded(row: Row) -> Row:
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(table: Table) -> list[list[str]]:
    return [list(table.columns.values()), *([_cell(row.get(key)) for key in table.columns] for row in table.rows)]


def _cell(value: float | str | None) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"
        case _:
            return str(value)

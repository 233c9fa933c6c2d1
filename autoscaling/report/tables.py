"""Tables of plain text for a terminal, a pipe or a Markdown file."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

_WIDTH = 10_000  # columns: wider than any table, so that rich neither folds nor cuts a cell


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]], first_number: int | None = 1) -> str:
    """Aligned with spaces: to the left, but to the right from the column `first_number` on (None: nowhere)."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for i, name in enumerate(heads):
        table.add_column(name, justify="left" if first_number is None or i < first_number else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None, markup=False, emoji=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As GitHub reads it, with the same alignment as text_table()."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *rows))

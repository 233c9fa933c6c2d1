"""Tables with their titles and notes: for a terminal, and as Markdown for a file of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoscaling.report.tables import markdown_table, text_table


@dataclass(frozen=True, slots=True)
class Table:
    """Each row has one text for each of `heads`. `notes`: sentences below it."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def text(self) -> str:
        return "\n".join([self.title, text_table(self.heads, self.rows), *(f"  ({note})" for note in self.notes)])

    def markdown(self) -> str:
        parts = [f"## {self.title}", markdown_table(self.heads, self.rows), _bullets(self.notes)]
        return "\n\n".join(part for part in parts if part)


def text(tables: Sequence[Table], failures: Sequence[str] = ()) -> str:
    """`failures`: what could not be measured, and why."""
    blocks = [table.text() for table in tables]
    return "\n\n".join([*blocks, *([f"Not measured\n{_bullets(failures)}"] if failures else [])])


def markdown(tables: Sequence[Table], failures: Sequence[str] = ()) -> str:
    """As text(), for a file."""
    blocks = [table.markdown() for table in tables]
    return "\n\n".join([*blocks, *([f"## Not measured\n\n{_bullets(failures)}"] if failures else [])]) + "\n"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)

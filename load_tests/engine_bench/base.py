"""What a part gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

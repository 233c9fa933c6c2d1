"""tests/cases.md names tests that exist, for every case."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
ROWS = [
    line.strip("| \n").split(" | ")
    for line in (TESTS / "cases.md").read_text().splitlines()
    if "`" in line or "not built" in line
]


def test_every_named_test_exists() -> None:
    named = [pair for row in ROWS for pair in re.findall(r"`([\w/]+\.py)::(\w+)`", row[-1])]
    assert len(named) > 100
    for file, name in named:
        path = TESTS / file
        assert path.is_file() and re.search(rf"^(async )?def {name}\(", path.read_text(), re.MULTILINE), (file, name)


def test_every_case_is_held_by_a_test_or_waits_for_a_feature() -> None:
    cases = [row for row in ROWS if re.fullmatch(r"n?\d+", row[0])]
    assert len({row[0] for row in cases}) == len(cases) == 103
    assert all("`" in row[-1] or row[-1].startswith("not built: ") for row in cases)

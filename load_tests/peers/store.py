"""Measurements as they come: one line of JSON each, so that an interrupted run can go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from load_tests.errors import LoadError
from load_tests.peers.measure import Measurement


@dataclass(frozen=True, slots=True)
class PeerRow:
    """Either `measurement` or `error` is there. `start_s`: how long the server took to answer right. `busy`: cores
    in use before the server was started; `at`: Unix time."""

    peer: str
    version: str
    workload: str
    round_number: int
    at: float
    busy: float
    start_s: float | None = None
    measurement: Measurement | None = None
    error: str | None = None


class Store:
    """The file is made anew unless `resume`. Failures are not resumed: what failed is tried again."""

    def __init__(self, file: Path, resume: bool) -> None:
        """Raises LoadError for a file that is none of ours."""
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self.rows = [row for row in _read(file) if row.error is None] if resume and file.exists() else []
        file.write_text("".join(map(_line, self.rows)))

    def add(self, row: PeerRow) -> None:
        self.rows.append(row)
        with self._file.open("a") as out:
            out.write(_line(row))

    def has(self, peer: str, workload: str, round_number: int) -> bool:
        return any((r.peer, r.workload, r.round_number) == (peer, workload, round_number) for r in self.rows)


def _line(row: PeerRow) -> str:
    return json.dumps(asdict(row)) + "\n"


def _read(file: Path) -> Iterator[PeerRow]:
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            raw = json.loads(line)
            found = raw.pop("measurement")
            yield PeerRow(**raw, measurement=Measurement(**found) if found else None)
        except (ValueError, TypeError, LookupError, AttributeError):
            raise LoadError(f"{file}:{number}: not a measurement; leave --resume, or change --out") from None

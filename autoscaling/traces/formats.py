"""Readers for recorded traffic. To add a format: one function from lines to rows, and one entry in the table.

| format | looks like | published by |
|---|---|---|
| azure | CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens | Azure/AzurePublicDataset |
| burstgpt | CSV: Timestamp (s), Request tokens, Response tokens, ... | HPMLL/BurstGPT |
| mooncake | JSON lines: timestamp (ms), input_length, output_length, hash_ids | kvcache-ai/Mooncake |
| request log | JSON lines: time, total_s, prompt_tokens, completion_tokens, ... | this project's gateway |
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path

MOONCAKE_BLOCK_TOKENS = 512


class TraceError(ValueError):
    """A file that is not a trace, or not wholly one. The message names the file and the request."""


@dataclass(frozen=True, slots=True)
class Row:
    """One recorded request. `at_s`: seconds from the first one. `blocks`: an id for each `block_tokens` tokens of the
    prompt (the last may be partly filled); equal leading ids are an equal prefix. Empty: nothing is known.
    `cached_tokens`: of the prompt, found in the prefix cache when it was recorded."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    cached_tokens: int = 0


def read_trace(path: Path) -> tuple[Row, ...]:
    """Rows in the order of their times, the first at 0; recorded failures (no output) are left out. The format is
    recognised by the first line. Raises TraceError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            rows = list(_rows(path, lines))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: not a text file") from None
    rows = sorted((r for r in rows if r.prompt_tokens > 0 and r.output_tokens > 0), key=lambda r: r.at_s)
    if not rows:
        raise TraceError(f"{path}: no requests in it")
    return tuple(replace(row, at_s=row.at_s - rows[0].at_s) for row in rows)


def _rows(path: Path, lines: Iterable[str]) -> Iterator[Row]:
    lines = iter(lines)
    first = next(lines, "")
    columns = frozenset(next(csv.reader([first]), []))
    read = next((read for needed, read in _READERS.items() if needed <= columns), None)
    if read is None and first.lstrip().startswith("{"):
        read = _request_log if '"total_s"' in first else _mooncake
    if read is None:
        known = "; ".join(", ".join(sorted(needed)) for needed in _READERS)
        raise TraceError(
            f"{path}: not a known trace. Known: CSV with columns {known}; JSON lines with input_length or total_s"
        )
    count = 0
    try:
        for row in read(chain([first], lines)):
            count += 1
            yield row
    except (ValueError, LookupError, TypeError) as error:
        raise TraceError(f"{path}: request {count + 1} cannot be read: {error}") from None


def _azure(lines: Iterable[str]) -> Iterator[Row]:
    for row in csv.DictReader(lines):
        at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
        yield Row(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _burstgpt(lines: Iterable[str]) -> Iterator[Row]:
    for row in csv.DictReader(lines):
        yield Row(float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))


def _mooncake(lines: Iterable[str]) -> Iterator[Row]:
    for line in lines:
        if line.strip():
            row = json.loads(line)
            blocks = tuple(int(block) for block in row.get("hash_ids", ()))
            yield Row(float(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"]), blocks)


def _request_log(lines: Iterable[str]) -> Iterator[Row]:
    """Each line is of a request's end. What generated nothing, refusals among them, has no completion_tokens."""
    for line in lines:
        if line.strip():
            row = json.loads(line)
            yield Row(
                float(row["time"]) - float(row["total_s"]),
                int(row["prompt_tokens"]),
                int(row["completion_tokens"]),
                cached_tokens=int(row.get("cached_tokens", 0)),
            )


_READERS: dict[frozenset[str], Callable[[Iterable[str]], Iterator[Row]]] = {
    frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}): _azure,
    frozenset({"Timestamp", "Request tokens", "Response tokens"}): _burstgpt,
}

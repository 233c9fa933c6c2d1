"""Files of ledger entries as JSON lines, each locked by the process that may write to it or remove it. The lock goes
with its process."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import orjson

from deployments.accounts.usage_entry import UsageEntry

log = logging.getLogger(__name__)


def lines_of(entries: Sequence[UsageEntry]) -> bytes:
    """One line for each entry."""
    return b"".join(orjson.dumps(asdict(entry), option=orjson.OPT_APPEND_NEWLINE) for entry in entries)


def entries_in(path: Path) -> list[UsageEntry]:
    """A line that was cut short by a crash is passed over. Raises OSError."""
    entries = []
    for line in path.read_bytes().splitlines():
        try:
            entries.append(UsageEntry(**orjson.loads(line)))
        except (orjson.JSONDecodeError, TypeError):
            log.error("%s: a line that is no ledger entry was passed over", path)
    return entries


def locked(path: Path, flags: int = 0) -> int | None:
    """The file, opened to read and write, and locked; None when it is gone or somebody else's. Raises OSError."""
    try:
        file = os.open(path, os.O_RDWR | flags, 0o600)
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):  # not replayed and removed meanwhile
            return file
    os.close(file)
    return None


def write_all(file: int, data: bytes, at: int) -> None:
    """Writes all of it from the position `at` on. Raises OSError, when a part may have been written."""
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, at)
        view, at = view[count:], at + count

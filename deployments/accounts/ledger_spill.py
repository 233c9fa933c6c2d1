"""Where ledger entries go while the database cannot be reached: files of JSON lines that only grow until they are
replayed."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import orjson

from deployments.accounts.usage_entry import UsageEntry

log = logging.getLogger(__name__)

_BATCH = 500  # entries in one transaction


class SpillFile:
    """One gateway's file in a directory that gateways share; also adopts the files of gateways that are gone. A file is
    locked by whoever may write to it or remove it, and the lock goes with its process. Safe on any thread."""

    def __init__(self, directory: Path, name: str) -> None:
        """`name` is no other living gateway's."""
        self._directory = directory
        self._path = directory / f"usage-{name}.jsonl"
        self._file: int | None = None  # open and locked while it has entries
        self._lock = threading.Lock()

    def append(self, entries: Sequence[UsageEntry]) -> None:
        """On disk when this returns. Raises OSError."""
        data = b"".join(orjson.dumps(asdict(entry), option=orjson.OPT_APPEND_NEWLINE) for entry in entries)
        with self._lock:
            if self._file is None:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._file = _locked(self._path, os.O_CREAT)
                if self._file is None:
                    raise OSError(f"{self._path} belongs to another process")
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)

    def replay(self, add: Callable[[list[UsageEntry]], None]) -> None:
        """Hands everything in the directory to `add`, in batches, and removes the files that were taken in whole.
        Raises what `add` raises: the file stays, and its entries come again."""
        with self._lock:
            for path in sorted(self._directory.glob("usage-*.jsonl")):
                mine = path == self._path and self._file is not None
                file = self._file if mine else _locked(path)
                if file is None:
                    continue  # its gateway lives, or another was quicker
                try:
                    entries = _read(path)
                    for start in range(0, len(entries), _BATCH):
                        add(entries[start : start + _BATCH])
                    path.unlink()
                    log.warning("%d ledger entries from %s are in the database now", len(entries), path)
                    mine = False
                finally:
                    if not mine:
                        os.close(file)
                        if file == self._file:
                            self._file = None

    def close(self) -> None:
        """Closes the file; its lock is free for others."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None


def _locked(path: Path, flags: int = 0) -> int | None:
    """The file, opened to append and locked; None when it is gone or somebody else's."""
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | flags, 0o600)
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):  # not replayed and removed meanwhile
            return file
    os.close(file)
    return None


def _read(path: Path) -> list[UsageEntry]:
    """A last line that was cut short by a crash is passed over: its request was never confirmed to be kept."""
    entries = []
    for line in path.read_bytes().splitlines():
        try:
            entries.append(UsageEntry(**orjson.loads(line)))
        except (orjson.JSONDecodeError, TypeError):
            log.error("%s: a line that is no ledger entry was passed over", path)
    return entries

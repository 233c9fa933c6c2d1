"""Where ledger entries go while the database cannot be reached: files that only grow until they are replayed."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from deployments.accounts.spill_lines import entries_in, lines_of, locked, write_all
from deployments.accounts.usage_entry import UsageEntry

log = logging.getLogger(__name__)

_BATCH = 500  # entries in one transaction


class SpillFile:
    """One gateway's file, `usage-NAME.jsonl`, in a directory that gateways share; also adopts the files of gateways
    that are gone. Safe on any thread."""

    def __init__(self, directory: Path, name: str) -> None:
        """`name` is no other living gateway's."""
        self._directory = directory
        self._path = directory / f"usage-{name}.jsonl"
        self._file: int | None = None  # open and locked while it has entries
        self._lock = threading.Lock()

    def append(self, entries: Sequence[UsageEntry]) -> None:
        """On disk when this returns; none of it is when it raises OSError."""
        with self._lock:
            if self._file is None:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._file = locked(self._path, os.O_CREAT)
                if self._file is None:
                    raise OSError(f"{self._path} belongs to another process")
            end = os.fstat(self._file).st_size
            try:
                write_all(self._file, lines_of(entries), end)
                os.fsync(self._file)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, end)  # half a line would swallow the next entry
                raise

    def replay(self, add: Callable[[list[UsageEntry]], None]) -> None:
        """Hands everything in the directory to `add`, in batches, and removes the files that were taken in whole.
        Raises what `add` raises: the file stays, and its entries come again."""
        with self._lock:
            # What has ended first: of the same request, what was noted while it ran is then passed over.
            for path in (*sorted(self._directory.glob("usage-*")), *sorted(self._directory.glob("running-*"))):
                mine = path == self._path and self._file is not None
                file = self._file if mine else locked(path)
                if file is None:
                    continue  # its gateway lives, or another was quicker
                try:
                    entries = entries_in(path)
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

"""What the requests that run have used so far, in a file, so that it is charged even if the gateway is killed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from deployments.accounts.spill_lines import lines_of, locked, write_all
from deployments.accounts.usage_entry import UsageEntry


class RunningFile:
    """One gateway's file, `running-NAME.jsonl`, locked while the gateway lives. SpillFile.replay() takes over those of
    gateways that are gone: an entry that has come into the database by then counts no second time."""

    def __init__(self, directory: Path, name: str) -> None:
        """`name` is no other living gateway's."""
        self._path = directory / f"running-{name}.jsonl"
        self._file: int | None = None

    def write(self, entries: Sequence[UsageEntry]) -> None:
        """Replaces what is in the file. A kill must not lose it; that the machine itself stops may. Raises OSError."""
        if self._file is None:
            if not entries:
                return
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = locked(self._path, os.O_CREAT)
            if self._file is None:
                raise OSError(f"{self._path} belongs to another process")
        data = lines_of(entries)
        # Over what was there, and only then cut: the worst that a kill leaves is one broken line and some old ones.
        write_all(self._file, data, at=0)
        os.ftruncate(self._file, len(data))

    def close(self) -> None:
        """Removes the file: every request has ended, and is in the ledger."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

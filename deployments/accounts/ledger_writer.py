"""Between the gateway, which must not wait, and the database, which may be slow or away."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

from deployments.accounts.budget import Budgets
from deployments.accounts.ledger_spill import SpillFile
from deployments.accounts.ledger_store import LedgerStore
from deployments.accounts.records import DatabaseDownError
from deployments.accounts.usage_entry import UsageEntry

log = logging.getLogger(__name__)

_BATCH = 500  # entries in one transaction


class LedgerWriter:
    """A thread that takes entries to the store every `flush_s`, or to the spill file when the store is down, and
    what was spilled to the store later. A clean stop loses nothing; a kill loses the last `flush_s`."""

    def __init__(
        self,
        run: str,
        store: LedgerStore,
        spill: SpillFile,
        budgets: Budgets,
        flush_s: float,
        max_queued: int = 20_000,
    ) -> None:
        """`run` begins every uid of this process's entries, and no other's. `max_queued` entries wait in memory."""
        self._run = run
        self._store, self._spill, self._budgets = store, spill, budgets
        self._flush_s = flush_s
        self._max_queued = max_queued
        self._queue: deque[UsageEntry] = deque()
        self._wake = threading.Event()
        self._stopped = False
        self._up: bool | None = None
        self._thread = threading.Thread(target=self._loop, name="ledger", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add(self, entry: UsageEntry) -> None:
        """Returns at once, but for one case: when the thread has not kept up for a very long time, the caller itself
        writes to the spill file, since that loses nothing."""
        self._budgets.charge(entry)
        if len(self._queue) >= self._max_queued:
            self._spill.append([entry])
            return
        self._queue.append(entry)
        if len(self._queue) == _BATCH:
            self._wake.set()

    def close(self) -> None:
        """Waits until every entry is in the database or in the spill file."""
        self._stopped = True
        self._wake.set()
        self._thread.join()
        self.flush()
        self._spill.close()

    def flush(self) -> None:
        """Everything queued so far goes where it can go; then what was spilled earlier, and the budgets are read."""
        try:
            while batch := self._take(_BATCH):
                try:
                    self._put(batch)
                except DatabaseDownError:
                    self._to_spill([*batch, *self._take(len(self._queue))])
                    raise
            self._spill.replay(self._put)
            self._budgets.refresh()
            self._up = True
        except (DatabaseDownError, OSError) as error:
            if self._up is not False:
                log.error("the ledger writes to a file while it can't reach its database: %s", error)
            self._up = False

    def _loop(self) -> None:
        while not self._stopped:
            self._wake.wait(self._flush_s)
            self._wake.clear()
            self.flush()

    def _put(self, entries: Sequence[UsageEntry]) -> None:
        self._store.add(entries)
        for entry in entries:
            if entry.uid.startswith(self._run):
                self._budgets.stored(entry)

    def _to_spill(self, entries: list[UsageEntry]) -> None:
        try:
            self._spill.append(entries)
        except OSError as error:
            log.error("the ledger can be written neither to the database nor to a file, and keeps waiting: %s", error)
            self._queue.extendleft(reversed(entries))

    def _take(self, limit: int) -> list[UsageEntry]:
        return [self._queue.popleft() for _ in range(min(limit, len(self._queue)))]

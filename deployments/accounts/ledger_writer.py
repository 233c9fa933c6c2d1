"""Between the gateway, which must not wait, and the database, which may be slow or away."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from deployments.accounts.budget import Budgets
from deployments.accounts.ledger_spill import SpillFile
from deployments.accounts.ledger_store import LedgerStore
from deployments.accounts.records import DatabaseDownError, DatabaseRefusedError
from deployments.accounts.running_file import RunningFile
from deployments.accounts.usage_entry import UsageEntry

log = logging.getLogger(__name__)

_BATCH = 500  # entries in one transaction
_MAX_QUEUED = 100_000  # entries in memory, some 60 MB, while neither database nor disk takes any


class LedgerWriter:
    """A thread that takes entries to the store every `flush_s`, or to the spill file when the store is down, and
    what was spilled to the store later. It also notes what the requests that run have used so far. A clean stop loses
    nothing; a kill loses what requests used within the last `flush_s`."""

    def __init__(
        self,
        run: str,
        store: LedgerStore,
        spill: SpillFile,
        budgets: Budgets,
        flush_s: float,
        running: Callable[[], Sequence[UsageEntry]] = tuple,
        running_file: RunningFile | None = None,
        max_queued: int = _MAX_QUEUED,
    ) -> None:
        """`run` begins every uid of this process's entries, and no other's. `running` gives what requests would be
        charged if they ended now, on the writer's thread."""
        self._run = run
        self._store, self._spill, self._budgets = store, spill, budgets
        self._running, self._running_file = running, running_file
        self._flush_s = flush_s
        self._max_queued = max_queued
        self._queue: deque[UsageEntry] = deque()
        self._num_lost = 0
        self._wake = threading.Event()
        self._stopped = False
        self._up: bool | None = None
        self._noting = True  # the running file could be written
        self._thread = threading.Thread(target=self._loop, name="ledger", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add(self, entry: UsageEntry) -> None:
        """Returns at once and never fails. Only when neither the database nor the disk has taken anything for very
        long, so that too many entries wait, is an entry lost, and the log says so; the project's budget is charged all
        the same."""
        self._budgets.charge(entry)
        if len(self._queue) >= self._max_queued:
            self._num_lost += 1
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
        if self._running_file is not None:
            self._running_file.close()

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
        self._note_running()
        if self._num_lost:
            lost, self._num_lost = self._num_lost, 0
            log.error("%d ledger entries are lost: neither the database nor the disk takes any", lost)

    def _loop(self) -> None:
        while not self._stopped:
            self._wake.wait(self._flush_s)
            self._wake.clear()
            try:
                self.flush()
            except Exception:  # whatever it is: without this thread nothing would be kept any more
                log.exception("the ledger could not be written, and tries again")

    def _put(self, entries: Sequence[UsageEntry]) -> None:
        try:
            self._store.add(entries)
        except DatabaseRefusedError as error:
            if len(entries) > 1:  # one at a time, so that only the one at fault is left out
                for entry in entries:
                    self._put([entry])
                return
            log.error("the database refuses a ledger entry, which is lost: %s: %s", error, entries[0])
        for entry in entries:
            if entry.uid.startswith(self._run):
                self._budgets.stored(entry)

    def _note_running(self) -> None:
        if self._running_file is None:
            return
        try:
            self._running_file.write(self._running())
            self._noting = True
        except OSError as error:
            if self._noting:
                log.error("a kill would now lose what the running requests have used: %s", error)
            self._noting = False

    def _to_spill(self, entries: list[UsageEntry]) -> None:
        try:
            self._spill.append(entries)
        except OSError as error:
            log.error("the ledger can be written neither to the database nor to a file, and keeps waiting: %s", error)
            self._queue.extendleft(reversed(entries))

    def _take(self, limit: int) -> list[UsageEntry]:
        return [self._queue.popleft() for _ in range(min(limit, len(self._queue)))]

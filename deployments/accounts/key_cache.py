"""The keys that a gateway knows at the moment: a cache over the store, which notices changes within a second.

Every gateway polls the database's revision, one row, a few times a second, and forgets the keys that were changed.
A broadcast among the gateways would be no quicker and would not do: `sluice keys` writes to the database without any
connection to Serve, and works while nothing is served at all.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from deployments.accounts.key_store import ChangedKeys, FoundKey, KeyStore
from deployments.accounts.records import DatabaseDownError, Key
from deployments.accounts.secret import prefix_of

log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0  # for one query; a database that takes longer counts as down
_UNKNOWN_S = 2.0  # for which a secret that was not found is not looked up again
_MAX_PENDING = 64  # look-ups that run or wait; more are refused, so that they do not pile up

T = TypeVar("T")


@dataclass(slots=True)
class _Entry:
    found: FoundKey
    read_at: float  # monotonic


@dataclass(slots=True)
class _LookUps:
    """Queries that run or wait, by the secret's mark. `turn`: what each holds while it runs."""

    turn: AbstractAsyncContextManager[None]
    tasks: dict[bytes, asyncio.Task[FoundKey | None]] = field(default_factory=dict)


class KeyCache:
    """Used from one event loop; the database is only touched in threads of the cache's own.

    A secret whose prefix no key has is most likely invented: those are looked up one at a time, so that a flood of them
    does not keep anybody else out. A key read within `fresh_s` is taken as it is, unless a change was seen since. While
    the database is down, keys go on for `grace_s` after they were last read, and others are not let in.
    """

    def __init__(
        self,
        store: KeyStore,
        fresh_s: float,
        poll_s: float,
        grace_s: float,
        prepare: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        max_known: int = 10_000,
        max_unknown: int = 1024,
    ) -> None:
        """`prepare` is run, in a thread, until it succeeds once; before that the database counts as down. `max_known`
        keys and `max_unknown` secrets that belong to none are kept, those used last."""
        self._store = store
        self._fresh_s, self._poll_s, self._grace_s = fresh_s, poll_s, grace_s
        self._prepare: Callable[[], None] | None = prepare
        self._clock, self._monotonic = clock, monotonic
        self._max_known, self._max_unknown = max_known, max_unknown
        self._hash_key = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, _Entry] = OrderedDict()
        self._unknown: OrderedDict[bytes, float] = OrderedDict()
        self._prefixes: set[str] = set()  # of all keys, once a revision is known
        self._pending = _LookUps(nullcontext())
        self._strangers = _LookUps(asyncio.Semaphore(1))  # of prefixes that no key has
        self._revision: int | None = None
        self._up: bool | None = None  # None: not tried yet
        self._threads = ThreadPoolExecutor(4, "keys")
        self._poll: asyncio.Future[ChangedKeys] | None = None

    async def find(self, secret: str) -> Key | None:
        """The key this is a secret of, whatever its status; None if there is none. Raises DatabaseDownError."""
        # Keyed, so that the time of the look-up tells an outsider nothing.
        mark = hashlib.blake2b(secret.encode(), key=self._hash_key, digest_size=32).digest()
        entry = self._known.get(mark)
        if entry is not None:
            age_s = self._monotonic() - entry.read_at
            if age_s <= self._fresh_s and self._up:
                self._known.move_to_end(mark)
                return self._valid(entry.found)
        prefix = prefix_of(secret)
        if prefix is None or self._unknown.get(mark, 0.0) > self._monotonic():
            return None
        try:
            expected = self._revision is None or prefix in self._prefixes
            found = await self._look_up(mark, secret, self._pending if expected else self._strangers)
        except DatabaseDownError:
            if entry is not None and self._monotonic() - entry.read_at <= self._grace_s:
                return self._valid(entry.found)
            raise
        return None if found is None else self._valid(found)

    async def watch(self) -> None:
        """Looks for changes every `poll_s` seconds. Runs until cancelled."""
        while True:
            with suppress(DatabaseDownError):  # said in the log already
                await self.refresh()
            await asyncio.sleep(self._poll_s)

    async def refresh(self) -> None:
        """Looks for changes once. Raises DatabaseDownError."""
        if self._poll is None:  # one that hung is waited for again, not joined by others
            self._poll = asyncio.get_running_loop().run_in_executor(self._threads, self._read_changes)
        done, _ = await asyncio.wait({self._poll}, timeout=_TIMEOUT_S)
        try:
            if not done:
                raise DatabaseDownError(f"no answer within {_TIMEOUT_S:g} seconds")
            poll, self._poll = self._poll, None
            changes = poll.result()
        except DatabaseDownError as error:
            if self._up is not False:
                log.error("the key database can't be reached: %s", error)
            self._up = False
            raise
        if self._up is False:
            log.warning("the key database can be reached again")
        self._up = True
        if changes.revision != self._revision:
            self._unknown.clear()
            for mark in [m for m, entry in self._known.items() if entry.found.key.id in changes.key_ids]:
                del self._known[mark]
        self._revision = changes.revision
        self._prefixes |= changes.prefixes

    def close(self) -> None:
        """Stops all look-ups."""
        for task in (*self._pending.tasks.values(), *self._strangers.tasks.values()):
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read_changes(self) -> ChangedKeys:
        if self._prepare is not None:
            self._prepare()
            self._prepare = None
        return self._store.changes(self._revision)

    async def _look_up(self, mark: bytes, secret: str, among: _LookUps) -> FoundKey | None:
        """One query however many requests come with the same secret."""
        if self._up is False:
            raise DatabaseDownError("the key database can't be reached")  # known without another try
        task = among.tasks.get(mark)
        if task is None:
            if len(among.tasks) >= _MAX_PENDING:
                raise DatabaseDownError("too many keys are being looked up")
            task = among.tasks[mark] = asyncio.create_task(self._read(mark, secret, among))
        return await asyncio.shield(task)

    async def _read(self, mark: bytes, secret: str, among: _LookUps) -> FoundKey | None:
        loop = asyncio.get_running_loop()
        try:
            async with among.turn:
                query = loop.run_in_executor(self._threads, self._store.find, secret)
                found = await asyncio.wait_for(query, _TIMEOUT_S)
        except TimeoutError:
            raise DatabaseDownError(f"no answer within {_TIMEOUT_S:g} seconds") from None
        finally:
            del among.tasks[mark]
        if found is None:
            self._known.pop(mark, None)
            _remember(self._unknown, mark, self._monotonic() + _UNKNOWN_S, self._max_unknown)
        elif found.revision >= (self._revision or 0):  # else it may be older than a change that is already dealt with
            _remember(self._known, mark, _Entry(found, self._monotonic()), self._max_known)
        return found

    def _valid(self, found: FoundKey) -> Key | None:
        return None if found.until is not None and found.until <= self._clock() else found.key


def _remember(cache: OrderedDict[bytes, T], mark: bytes, value: T, limit: int) -> None:
    cache[mark] = value
    cache.move_to_end(mark)
    if len(cache) > limit:
        cache.popitem(last=False)

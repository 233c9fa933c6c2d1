"""Counts in this process: exact for one gateway replica, and gone with it."""

from __future__ import annotations

import time
from collections.abc import Callable

from deployments.limits.base import Amount, Claim, Grant, Meter, Refusal, State
from deployments.limits.book import Book


class MemoryStore:
    """See base.Store. Never out of reach."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._book = Book()

    async def reserve(self, claim: Claim) -> Grant | Refusal:
        return self._book.reserve(claim, self._clock())

    def settle(self, claim: Claim, used: Amount) -> None:
        self._book.settle(claim.id, used)

    async def peek(self, meters: tuple[Meter, ...], org: str) -> tuple[State, ...]:
        return self._book.peek(meters, self._clock())

    async def close(self) -> None:
        pass

"""Threads for calls of the database, so that one that hangs takes no other work's threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from deployments.accounts.records import DatabaseDownError

_THREADS = 4
_MAX_CALLS = 64  # that run or wait
_CALL_S = 60.0  # for one; sums over a large ledger take long

R = TypeVar("R")


class StoreThreads:
    """Calls of stores, from one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "accounts")
        self._num_calls = 0

    async def call(self, work: Callable[..., R], *args: Any) -> R:
        """Raises what `work` does, and DatabaseDownError when it takes too long, or too many calls wait."""
        if self._num_calls >= _MAX_CALLS:
            raise DatabaseDownError("too many calls wait for the database")
        self._num_calls += 1
        call = asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        call.add_done_callback(self._ended)
        try:
            async with asyncio.timeout(_CALL_S):
                return await asyncio.shield(call)
        except TimeoutError:
            raise DatabaseDownError(f"no answer within {_CALL_S:g} seconds") from None

    def close(self) -> None:
        """Starts no more calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, call: asyncio.Future[Any]) -> None:
        self._num_calls -= 1
        if not call.cancelled():
            call.exception()  # nobody may have waited for it

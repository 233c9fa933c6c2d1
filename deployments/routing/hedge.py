"""Makes two attempts at one answer. The one that begins first goes on, the other is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar


class Closable(Protocol):
    """What an attempt returns: an answer that has begun."""

    def close(self) -> None:
        """Aborts what still runs."""


T = TypeVar("T", bound=Closable)
Attempt = Callable[[], Awaitable[T]]


async def hedged(first: Attempt[T], second: Attempt[T], delay_s: float) -> T:
    """Makes the `first` attempt, and the `second` beside it if that has not returned within `delay_s` seconds.

    Returns what the quicker one returns. When one fails while the other is running, the other decides; when both fail,
    raises the error of one. The attempt that is not returned is cancelled or closed.
    """
    running: set[asyncio.Future[T]] = {asyncio.ensure_future(first())}
    errors: list[BaseException] = []
    winner: T | None = None
    try:
        await asyncio.wait(running, timeout=delay_s)
        if not any(task.done() for task in running):
            running.add(asyncio.ensure_future(second()))
        while running and winner is None:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) is not None:
                    running.discard(task)
                    errors.append(error)
                elif winner is None:
                    running.discard(task)
                    winner = task.result()
    finally:
        await _abandon(running)
    if winner is None:
        raise errors[0]
    return winner


async def _abandon(running: set[asyncio.Future[T]]) -> None:
    for task in running:
        task.cancel()
    for begun in await asyncio.gather(*running, return_exceptions=True):
        if not isinstance(begun, BaseException):
            begun.close()

"""Two attempts, one answer: whichever gives its first item first goes on, the other is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")
Attempt = Callable[[], AsyncGenerator[T, None]]


async def hedged(first: Attempt[T], second: Attempt[T], delay_s: float) -> AsyncGenerator[T, None]:
    """The items of `first`; or, if it has given none for `delay_s`, of the quicker of the two. An attempt that fails
    before its first item leaves the answer to the other while that is running; when both fail, the error of one
    is raised. Neither outlives this generator."""
    running: dict[asyncio.Task[T], AsyncGenerator[T, None]] = {}
    errors: list[BaseException] = []

    def start(attempt: Attempt[T]) -> None:
        stream = attempt()
        running[asyncio.create_task(_first(stream))] = stream

    start(first)
    try:
        await asyncio.wait(running, timeout=delay_s)
        if not any(task.done() for task in running):
            start(second)
        winner: tuple[T, AsyncGenerator[T, None]] | None = None
        while running and winner is None:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task in done]:
                stream = running.pop(task)
                error = task.exception()
                if error is None and winner is None:
                    winner = (task.result(), stream)
                    continue
                await stream.aclose()
                if error is not None:
                    errors.append(error)
    finally:
        await _close(running)
    if winner is None:
        raise errors[0]
    item, stream = winner
    async with aclosing(stream):
        yield item
        async for item in stream:
            yield item


async def _first(stream: AsyncGenerator[T, None]) -> T:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        raise RuntimeError("an attempt ended without giving anything") from None


async def _close(running: dict[asyncio.Task[T], AsyncGenerator[T, None]]) -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for stream in running.values():
        await stream.aclose()

"""Two attempts, one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from deployments.routing.hedge import hedged


class Attempts:
    """Makes attempts and remembers what became of them. An item that is an event is waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def run(self, name: str, items: Sequence[int | asyncio.Event | Exception]) -> AsyncGenerator[int, None]:
        self.log.append(f"{name} begun")
        try:
            for item in items:
                if isinstance(item, asyncio.Event):
                    await item.wait()
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            self.log.append(f"{name} closed")


async def both(
    a: Sequence[int | asyncio.Event | Exception], b: Sequence[int | asyncio.Event | Exception], delay_s: float = 0.001
) -> tuple[list[int], list[str]]:
    attempts = Attempts()
    got = [item async for item in hedged(lambda: attempts.run("a", a), lambda: attempts.run("b", b), delay_s)]
    return got, attempts.log


async def test_a_quick_first_one_is_alone() -> None:
    assert await both([1, 2], [3], delay_s=60) == ([1, 2], ["a begun", "a closed"])


async def test_the_second_one_wins_over_a_silent_first() -> None:
    got, log = await both([asyncio.Event(), 1], [3, 4])
    assert got == [3, 4] and sorted(log) == ["a begun", "a closed", "b begun", "b closed"]


async def test_the_first_may_still_win() -> None:
    late = asyncio.Event()
    attempts = Attempts()
    stream = hedged(lambda: attempts.run("a", [late, 1]), lambda: attempts.run("b", [asyncio.Event()]), 0.001)
    task = asyncio.ensure_future(anext(stream))
    while "b begun" not in attempts.log:
        await asyncio.sleep(0)
    late.set()
    assert await task == 1
    assert "b closed" in attempts.log
    await stream.aclose()


async def test_one_that_fails_leaves_it_to_the_other() -> None:
    go = asyncio.Event()
    attempts = Attempts()
    stream = hedged(
        lambda: attempts.run("a", [go, ValueError()]), lambda: attempts.run("b", [go, asyncio.Event()]), 0.0
    )
    task = asyncio.ensure_future(anext(stream))
    while "b begun" not in attempts.log:
        await asyncio.sleep(0)
    go.set()
    while "a closed" not in attempts.log:
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "b closed" in attempts.log


async def test_a_failure_before_the_delay_is_the_answer() -> None:
    with pytest.raises(ValueError):
        await both([ValueError()], [1], delay_s=60)


async def test_when_both_fail_so_does_the_answer() -> None:
    go = asyncio.Event()
    attempts = Attempts()
    stream = hedged(lambda: attempts.run("a", [go, ValueError()]), lambda: attempts.run("b", [KeyError()]), 0.0)
    task = asyncio.ensure_future(anext(stream))
    while "b closed" not in attempts.log:
        await asyncio.sleep(0)
    go.set()
    with pytest.raises((KeyError, ValueError)):
        await task


async def test_leaving_early_closes_what_runs() -> None:
    attempts = Attempts()
    stream = hedged(lambda: attempts.run("a", [1, 2]), lambda: attempts.run("b", [3]), 60)
    assert await anext(stream) == 1
    await stream.aclose()
    assert attempts.log == ["a begun", "a closed"]


async def test_an_attempt_that_gives_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError):
        await both([], [1], delay_s=60)

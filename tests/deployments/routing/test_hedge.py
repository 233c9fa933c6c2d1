"""Two attempts, one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from deployments.routing.hedge import hedged

Step = str | asyncio.Event | Exception


class Begun:
    """What an attempt gives."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log

    def close(self) -> None:
        self._log.append(f"{self.name} closed")


class Attempts:
    """Makes attempts and remembers what became of them. A step that is an event is waited for, an error is raised."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def run(self, name: str, *steps: Step) -> Begun:
        self.log.append(f"{name} asked")
        try:
            for step in steps:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
        except BaseException as error:
            self.log.append(f"{name} {type(error).__name__}")
            raise
        self.log.append(f"{name} begun")
        return Begun(name, self.log)

    async def both(self, a: Sequence[Step], b: Sequence[Step], delay_s: float = 0.001) -> str:
        """Who has won."""
        return (await hedged(lambda: self.run("a", *a), lambda: self.run("b", *b), delay_s)).name

    async def until(self, entry: str) -> None:
        async with asyncio.timeout(60):
            while entry not in self.log:
                await asyncio.sleep(0)


@pytest.fixture
def attempts() -> Attempts:
    return Attempts()


async def test_a_quick_first_one_is_alone(attempts: Attempts) -> None:
    assert await attempts.both([], [], delay_s=60) == "a"
    assert attempts.log == ["a asked", "a begun"]


async def test_the_second_one_wins_over_a_silent_first(attempts: Attempts) -> None:
    assert await attempts.both([asyncio.Event()], []) == "b"
    assert attempts.log == ["a asked", "b asked", "b begun", "a CancelledError"]


async def test_the_first_may_still_win(attempts: Attempts) -> None:
    late = asyncio.Event()
    task = asyncio.create_task(attempts.both([late], [asyncio.Event()]))
    await attempts.until("b asked")
    late.set()
    assert await task == "a"
    assert attempts.log == ["a asked", "b asked", "a begun", "b CancelledError"]


async def test_of_two_that_begin_at_once_one_is_closed(attempts: Attempts) -> None:
    go = asyncio.Event()
    task = asyncio.create_task(attempts.both([go], [go]))
    await attempts.until("b asked")
    go.set()
    winner = await task
    loser = "b" if winner == "a" else "a"
    assert attempts.log == ["a asked", "b asked", "a begun", "b begun", f"{loser} closed"]


async def test_one_that_fails_leaves_it_to_the_other(attempts: Attempts) -> None:
    go = asyncio.Event()
    task = asyncio.create_task(attempts.both([go, ValueError()], [go, asyncio.Event()], 0.0))
    await attempts.until("b asked")
    go.set()
    await attempts.until("a ValueError")
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert attempts.log[-1] == "b CancelledError"


async def test_a_failure_before_the_delay_is_the_answer(attempts: Attempts) -> None:
    with pytest.raises(ValueError):
        await attempts.both([ValueError()], [], delay_s=60)
    assert attempts.log == ["a asked", "a ValueError"]


async def test_when_both_fail_so_does_the_answer(attempts: Attempts) -> None:
    go = asyncio.Event()
    task = asyncio.create_task(attempts.both([go, ValueError()], [KeyError()], 0.0))
    await attempts.until("b KeyError")
    await asyncio.sleep(0.01)  # else both fail in the same turn of the loop, and either is raised
    go.set()
    with pytest.raises(KeyError):
        await task


async def test_leaving_cancels_what_runs(attempts: Attempts) -> None:
    task = asyncio.create_task(attempts.both([asyncio.Event()], [asyncio.Event()]))
    await attempts.until("b asked")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(attempts.log[2:]) == ["a CancelledError", "b CancelledError"]

"""Destinations without replicas and servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from engine.types import TokenDelta


class Results:
    """What a broadcast of a Serve handle gives. `answers`: of each replica; an exception is raised in its place."""

    def __init__(self, answers: Callable[[], Awaitable[list[Any]]]) -> None:
        self._answers = answers

    async def _fetch_replica_results_async(self) -> list[Result]:
        return [Result(answer) for answer in await self._answers()]


class Result:
    """One replica's. HANGS: it never comes."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def get_async(self) -> Any:
        if self._answer is HANGS:
            await asyncio.Event().wait()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


HANGS = object()


class BegunStream:
    """What begin() of a destination gives, played by a generator whose first deltas are there."""

    def __init__(
        self, first: list[TokenDelta], rest: AsyncGenerator[list[TokenDelta], None], weights: str | None
    ) -> None:
        self._first: list[TokenDelta] | None = first
        self._rest = rest
        self.weights = weights

    @classmethod
    async def of(
        cls,
        deltas: AsyncGenerator[list[TokenDelta], None],
        within_s: float | None = None,
        weights: str | None = "w",
    ) -> BegunStream:
        async with asyncio.timeout(within_s):
            return cls(await anext(deltas), deltas, weights)

    def __aiter__(self) -> BegunStream:
        return self

    async def __anext__(self) -> list[TokenDelta]:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await anext(self._rest)

    def close(self) -> None:
        with suppress(StopIteration):  # its `finally` awaits nothing
            self._rest.aclose().send(None)

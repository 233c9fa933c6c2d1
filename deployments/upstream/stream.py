"""The deltas of one answer of an upstream, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import aiohttp

from deployments.upstream.answer import UpstreamAnswer
from deployments.upstream.errors import UpstreamDownError, UpstreamError
from deployments.upstream.events import EventParser, EventTooLargeError
from engine.types import TokenDelta

_TAIL_S = 0.1  # for the end of a body whose [DONE] has come: it saves the next request a connection


class UpstreamStream:
    """An async iterator of deltas without token ids, to be used once and then closed.

    Ends normally only after the last delta of every choice. Raises UpstreamError and its kin. `translated_errors` makes
    them of aiohttp's. `on_closed` is called once.
    """

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        answer: UpstreamAnswer,
        translated_errors: Callable[[], AbstractContextManager[None]],
        on_closed: Callable[[], None],
    ) -> None:
        self._response = response
        self._answer = answer
        self._translated_errors = translated_errors
        self._on_closed = on_closed
        self._events = EventParser()
        self._arrived: list[bytes] = []  # events that have not been read
        self._first: list[TokenDelta] = []  # taken from the answer, but not yet given out
        self._at_end = False  # of the body
        self._finished = False
        self._closed = False

    weights = None  # nobody knows them

    async def first_event(self) -> None:
        """Waits for the first event, whatever it says, or the end. Raises what __anext__() does."""
        while not self._arrived and not self._at_end:
            self._arrived = await self._next_events()

    async def begin(self) -> None:
        """Waits for the first deltas. Raises what __anext__() does."""
        self._first = await anext(self)

    def __aiter__(self) -> UpstreamStream:
        return self

    async def __anext__(self) -> list[TokenDelta]:
        if self._first:
            first, self._first = self._first, []
            return first
        while True:
            if self._finished:
                await self._read_to_end()
                raise StopAsyncIteration
            if self._answer.fault is not None:
                raise self._answer.fault
            if self._answer.done or self._at_end:
                deltas = self._answer.finish()
                self._finished = True
                return deltas
            events, self._arrived = self._arrived or await self._next_events(), []
            if deltas := self._answer.read(events):
                return deltas

    def close(self) -> None:
        """Closes the connection, unless all of the answer has been read. Not a coroutine: nothing can cut it short."""
        if not self._closed:
            self._closed = True
            self._response.close()
            self._on_closed()

    async def _next_events(self) -> list[bytes]:
        with self._translated_errors():
            chunk = await self._response.content.readany()
        if not chunk:
            self._at_end = True
            return []
        try:
            return self._events.feed(chunk)
        except EventTooLargeError as error:
            raise UpstreamDownError(str(error)) from None

    async def _read_to_end(self) -> None:
        """What follows [DONE] is only the end of the body, and with that the connection can be used again."""
        with suppress(TimeoutError, UpstreamError):
            async with asyncio.timeout(_TAIL_S):
                while not self._at_end:
                    await self._next_events()

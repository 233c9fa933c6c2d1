"""Server-sent events to one client, who may be slow, silent or gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import orjson
from starlette.types import Message, Send

from deployments.api.body import ClientGoneError
from deployments.ray_serve.proxy_guard import SEND_TIMEOUT

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def events(payloads: Iterable[Any]) -> bytes:
    """Each payload as an event of JSON."""
    return b"".join(b"data: " + orjson.dumps(payload) + b"\n\n" for payload in payloads)


def json_event(json: bytes) -> bytes:
    """An event whose payload is JSON already."""
    return b"data: " + json + b"\n\n"


class EventStream:
    """A 200 answer of events. To be used as a context: leaving it stops the comments.

    The head goes out with the first event. After `keepalive_s` without any event, in the queue already, a comment does,
    lest somebody on the way take the silence for a dead connection: from then on an error is an event too. A client
    that takes nothing for `send_timeout_s` counts as gone: ClientGoneError from write() or end().
    """

    def __init__(self, send: Send, keepalive_s: float, send_timeout_s: float) -> None:
        self._send = send
        self._keepalive_s = keepalive_s
        self._send_timeout_s = send_timeout_s
        self._last_s = time.monotonic()
        self._begun = False
        self._sending = asyncio.Lock()
        self._beat: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EventStream:
        self._beat = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop_comments()

    async def begun(self) -> bool:
        """Whether the head is out. If not, no comment will send it any more: another answer may take its place."""
        async with self._sending:
            if not self._begun:
                self._stop_comments()
            return self._begun

    async def write(self, data: bytes) -> None:
        """One or more whole events. Raises ClientGoneError."""
        async with self._sending:
            await self._put(data, True)

    async def end(self, data: bytes) -> None:
        """The last bytes; nothing may follow."""
        async with self._sending:  # no comment is half-way out
            self._stop_comments()
            await self._put(data, False)

    async def _put(self, data: bytes, more: bool) -> None:
        self._last_s = time.monotonic()
        try:
            async with asyncio.timeout(self._send_timeout_s):
                if not self._begun:
                    self._begun = True
                    head: Message = {"type": "http.response.start", "status": 200, "headers": list(_HEADERS)}
                    await self._send({**head, SEND_TIMEOUT: self._send_timeout_s})
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientGoneError from None

    async def _keep_alive(self) -> None:
        while True:
            silent_s = time.monotonic() - self._last_s
            if silent_s < self._keepalive_s:
                await asyncio.sleep(self._keepalive_s - silent_s)
                continue
            try:
                await self.write(_KEEP_ALIVE)
            except ClientGoneError:  # the next event meets the same
                return

    def _stop_comments(self) -> None:
        if self._beat is not None:
            self._beat.cancel()

"""Server-sent events to one client, who may be slow, silent or gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import orjson
from starlette.types import Send

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def events(payloads: Iterable[Any]) -> bytes:
    return b"".join(b"data: " + orjson.dumps(payload) + b"\n\n" for payload in payloads)


def json_event(json: bytes) -> bytes:
    """An event whose payload is JSON already."""
    return b"data: " + json + b"\n\n"


class EventStream:
    """A 200 answer of events. After `keepalive_s` without any it writes a comment, so that nobody on the way takes
    the silence for a dead connection. To be used as a context: leaving it stops the comments."""

    def __init__(self, send: Send, keepalive_s: float) -> None:
        self._send = send
        self._keepalive_s = keepalive_s
        self._last_s = time.monotonic()
        self._beat: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EventStream:
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        self._beat = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._beat is not None:
            self._beat.cancel()

    async def write(self, data: bytes) -> None:
        self._last_s = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        """The last bytes; nothing may follow."""
        if self._beat is not None:
            self._beat.cancel()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _keep_alive(self) -> None:
        while True:
            silent_s = time.monotonic() - self._last_s
            if silent_s >= self._keepalive_s:
                await self.write(_KEEP_ALIVE)
            else:
                await asyncio.sleep(self._keepalive_s - silent_s)

"""An external server that misbehaves on demand, as an httpx transport: no sockets, no timing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

Item = bytes | asyncio.Event | Exception


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def said(text: str, index: int = 0, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]})


DONE = event(b"[DONE]")
USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}},
    }
)
GOOD: Sequence[Item] = (said("", 0), said("one "), said("two"), said("", 0, "stop"), USAGE, DONE)


class Body(httpx.AsyncByteStream):
    def __init__(self, items: Sequence[Item], closed: list[bool]) -> None:
        self._items = items
        self._closed = closed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for item in self._items:
            if isinstance(item, bytes):
                yield item
            elif isinstance(item, Exception):
                raise item
            else:
                await item.wait()

    async def aclose(self) -> None:
        self._closed.append(True)


@dataclass
class StandIn(httpx.AsyncBaseTransport):
    """`items`: the body, piece by piece; an event is waited for, an error raised. `down`: raised instead of an
    answer."""

    items: Sequence[Item] = GOOD
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "text/event-stream; charset=utf-8"})
    down: Exception | None = None
    silent: asyncio.Event | None = None
    asked: list[tuple[httpx.Request, dict[str, Any]]] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request, json.loads(await request.aread())))
        if self.silent is not None:
            await self.silent.wait()
        if self.down is not None:
            raise self.down
        return httpx.Response(self.status, headers=self.headers, stream=Body(self.items, self.closed))

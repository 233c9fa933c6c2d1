"""An external server that misbehaves on demand, on a loopback socket."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from deployments.config.upstream import UpstreamConfig
from deployments.upstream.client import Upstream

BREAK = "break"  # the connection ends without a word
Item = bytes | asyncio.Event | str


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
EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8"}


@dataclass
class StandIn:
    """`items`: the body, piece by piece; an event is waited for. `silent` is waited for before an answer begins.
    `raw`: sent in place of an answer's head and body. `asked`: path, headers and body of each request.
    `connections`: how many there have been; `open`: how many there are."""

    items: Sequence[Item] = GOOD
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: EVENT_STREAM)
    silent: asyncio.Event | None = None
    raw: Sequence[Item] | None = None
    asked: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    connections: int = 0
    open: int = 0

    @asynccontextmanager
    async def listening(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
        """Gives its base URL."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{port}/v1"
        finally:
            server.close()

    @asynccontextmanager
    async def upstream(self, **settings: Any) -> AsyncIterator[Upstream]:
        """A client of it."""
        async with self.listening() as url:
            client = Upstream(UpstreamConfig.model_validate({"name": "elsewhere", "base_url": url, **settings}))
            try:
                yield client
            finally:
                await client.close()

    async def left(self) -> None:
        """Until the client has closed its connections."""
        async with asyncio.timeout(60):
            while self.open:
                await asyncio.sleep(0.001)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode("latin-1"), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, _Over):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def _answer(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = head.split("\r\n")[:-2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers["content-length"]))
        self.asked.append((first.split(" ")[1], headers, json.loads(body)))
        await self._play([] if self.silent is None else [self.silent], reader, writer, chunked=False)
        if self.raw is not None:
            await self._play(self.raw, reader, writer, chunked=False)
            raise _Over
        said_headers = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        writer.write(f"HTTP/1.1 {self.status} So\r\n{said_headers}transfer-encoding: chunked\r\n\r\n".encode())
        await self._play(self.items, reader, writer, chunked=True)
        writer.write(b"0\r\n\r\n")

    async def _play(
        self, items: Sequence[Item], reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chunked: bool
    ) -> None:
        for item in items:
            if isinstance(item, bytes):
                if item:
                    writer.write(b"%x\r\n%s\r\n" % (len(item), item) if chunked else item)
                    await writer.drain()
                    await asyncio.sleep(0)
            elif isinstance(item, str):
                raise _Over
            else:
                gone = asyncio.ensure_future(reader.read())  # returns when the client has left
                waited = asyncio.ensure_future(item.wait())
                done, others = await asyncio.wait((gone, waited), return_when=asyncio.FIRST_COMPLETED)
                for other in others:
                    other.cancel()
                if gone in done:
                    raise _Over


class _Over(Exception):
    """Nothing more is said on this connection."""

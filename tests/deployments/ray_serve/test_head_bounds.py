"""uvicorn with bounds on heads, over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from deployments.ray_serve import head_bounds
from deployments.ray_serve.head_bounds import BoundedHeadProtocol
from deployments.ray_serve.request_head import MAX_HEADER_BYTES

pytestmark = pytest.mark.sockets

PIECE = b"a" * 4096


async def app(scope: Any, receive: Any, send: Any) -> None:
    size = 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = str(size).encode()
    head = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off", http=BoundedHeadProtocol))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


async def flood(writer: asyncio.StreamWriter, start: bytes, piece: bytes = PIECE) -> int:
    """Sends `start` and then pieces until nobody takes them. Returns how many bytes were taken."""
    sent = 0
    writer.write(start)
    try:
        while sent < 64 * MAX_HEADER_BYTES:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
            await asyncio.sleep(0)
    except ConnectionError:
        pass
    return sent


@pytest.mark.parametrize(
    "start",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\nhost: a\r\nx: ",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1;",
    ],
    ids=["url", "header", "trailer", "chunk extension"],
)
async def test_what_never_ends_is_cut(start: bytes) -> None:
    async with connection() as (_, writer):
        assert await flood(writer, start) < 16 * MAX_HEADER_BYTES


async def test_the_client_is_told_why() -> None:
    async with connection() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nx: ")
        for _ in range(2 * MAX_HEADER_BYTES // len(PIECE) + 1):
            writer.write(PIECE)
            await writer.drain()
        answer = await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ") and b"connection: close" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_slow_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_bounds, "HEAD_S", 0.2)
    async with connection() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    async with connection() as (reader, writer):
        assert await reader.read() == b""


async def test_large_bodies_and_many_requests_pass() -> None:
    async with connection() as (reader, writer):
        for size in (0, 1, 40 * MAX_HEADER_BYTES):
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size + bytes(size))
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(len(str(size))) == str(size).encode()
        for _ in range(100):
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nx: %s\r\n\r\n" % PIECE)
        for _ in range(100):
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(1) == b"0"

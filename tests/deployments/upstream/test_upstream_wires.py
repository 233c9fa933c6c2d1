"""Upstreams over real connections without TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from helpers_upstream import DONE, GOOD, event

from deployments.config.upstream import UpstreamConfig
from deployments.upstream.client import Upstream, UpstreamCall
from deployments.upstream.errors import UpstreamBusyError, UpstreamDownError, UpstreamSlowError
from deployments.upstream.tls_wire import TlsWire
from deployments.upstream.wires import HttpxWire, PlainWire, wire
from engine.types import FinishReason

CALL = UpstreamCall("/chat/completions", {"model": "m", "messages": []}, ["r"], 1, 20)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Server:
    """Answers each request with `pieces`; None waits for ever, and an answer that ends with b"" is cut off."""

    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        self.pieces = pieces
        self.connections = 0
        self.requests: list[bytes] = []
        self.left = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.pieces:
                    if piece is None:
                        await reader.read()
                        return
                    if not piece:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.left.set()
            writer.close()


@asynccontextmanager
async def served(pieces: Sequence[bytes | None], **settings: Any) -> AsyncIterator[tuple[Upstream, Server]]:
    server = Server(pieces)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
    client = Upstream(UpstreamConfig.model_validate({"name": "there", "base_url": url, **settings}))
    yield client, server
    await client.close()
    listener.close()


async def text_of(client: Upstream) -> str:
    deltas = [delta async for deltas in client.generate(CALL) for delta in deltas]
    assert deltas[-1].finish_reason is FinishReason.STOP
    return "".join(delta.text for delta in deltas)


WHOLE = [HEAD, *(chunk(item) for item in GOOD if isinstance(item, bytes)), b"0\r\n\r\n"]


async def test_a_connection_is_used_again_although_its_answer_ends_after_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSEWHERE_KEY", "sk-secret")
    async with served(WHOLE, api_key="env:ELSEWHERE_KEY") as (client, server):
        for _ in range(3):
            assert await text_of(client) == "one two"
        assert server.connections == 1
        assert b"POST /v1/chat/completions HTTP/1.1" in server.requests[0]
        assert b"authorization: bearer sk-secret" in server.requests[0].lower()


async def test_what_comes_together_is_one_delta() -> None:
    async with served([b"".join(WHOLE)]) as (client, _):
        batches = [deltas async for deltas in client.generate(CALL)]
    assert [[delta.text for delta in deltas] for deltas in batches] == [["one two"], [""]]
    assert batches[0][0].num_completion_tokens == 2


async def test_leaving_closes_the_connection() -> None:
    async with served([*WHOLE[:3], None]) as (client, server):
        stream = client.generate(CALL)
        assert (await anext(stream))[0].text == "one "
        await stream.aclose()
        await server.left.wait()


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([b""], UpstreamDownError),
        ([b"what?\r\n\r\n"], UpstreamDownError),
        ([*WHOLE[:3], b""], UpstreamDownError),
        ([HEAD, b"zz\r\n"], UpstreamDownError),
        ([HEAD, chunk(event(b"[DONE"))], UpstreamDownError),
        ([HEAD, chunk(DONE), b"0\r\n\r\n"], UpstreamDownError),
        ([b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"], UpstreamDownError),
        ([b"HTTP/1.1 429 No\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n"], UpstreamBusyError),
    ],
)
async def test_what_goes_wrong(pieces: Sequence[bytes | None], kind: type[Exception]) -> None:
    async with served(pieces) as (client, _):
        with pytest.raises(kind):
            await text_of(client)


async def test_silence() -> None:
    for settings in ({"first_token_s": 0.01}, {"idle_s": 0.01}):
        async with served([HEAD, None], **settings) as (client, _):
            with pytest.raises(UpstreamSlowError):
                await text_of(client)


async def test_nobody_listens() -> None:
    async with served([]) as (_, _):
        pass
    client = Upstream(UpstreamConfig(name="there", base_url="http://127.0.0.1:1/v1"))
    with pytest.raises(UpstreamDownError):
        await text_of(client)
    await client.close()


async def test_tls_and_proxies_are_left_to_the_library_that_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(url: str) -> type:
        made = wire(UpstreamConfig(name="there", base_url=url))
        asyncio.get_running_loop().create_task(made.close())
        return type(made)

    for name in ("http_proxy", "no_proxy", "HTTP_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert kind("http://there/v1") is PlainWire
    assert kind("https://there/v1") is TlsWire
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:3128")
    monkeypatch.setenv("no_proxy", "inside")
    assert kind("http://there/v1") is HttpxWire
    assert kind("http://inside/v1") is PlainWire

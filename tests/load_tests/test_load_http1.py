from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.client import Endpoint
from load_tests.errors import LoadError
from load_tests.http1 import ProtocolError, ResponseParser
from load_tests.outcome import RequestOutcome

pytestmark = pytest.mark.sockets

BODIES = st.lists(st.binary(min_size=1, max_size=40), max_size=5)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(marks)]


def parse(data: bytes, cuts: list[int]) -> tuple[ResponseParser, bytes]:
    parser = ResponseParser()
    return parser, b"".join(parser.feed(piece) for piece in pieces_of(data, cuts))


@given(BODIES, st.lists(st.integers(0, 1000)), st.booleans())
def test_chunks_are_joined_however_they_arrive(chunks: list[bytes], cuts: list[int], trailer: bool) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"".join(b"%X;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    parser, got = parse(head + body + b"0\r\n" + (b"X: y\r\n" if trailer else b"") + b"\r\n", cuts)
    assert got == b"".join(chunks)
    assert parser.done and parser.status == 200 and parser.keep_alive


@given(st.binary(max_size=60), st.lists(st.integers(0, 1000)))
def test_a_counted_body_ends_by_itself(body: bytes, cuts: list[int]) -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\n"
    head = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\nConnection: Close\r\n\r\n" % len(body)
    parser, got = parse(early + head + body, cuts)
    assert (got, parser.done, parser.status, parser.keep_alive) == (body, True, 429, False)


@given(st.binary(max_size=60), st.lists(st.integers(0, 1000)))
def test_a_body_without_a_length_ends_with_the_connection(body: bytes, cuts: list[int]) -> None:
    parser, got = parse(b"HTTP/1.0 200 OK\r\n\r\n" + body, cuts)
    assert (got, parser.done) == (body, False)
    parser.eof()
    assert parser.done and not parser.keep_alive


def test_a_cut_off_body_is_not_done() -> None:
    parser, _ = parse(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", [])
    parser.eof()
    assert not parser.done


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc",
        b"x" * 70000,
    ],
)
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseParser().feed(data)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host", "http://", "http://host:99999"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(LoadError, match="not an http"):
        Endpoint(url)


def test_a_key_cannot_smuggle_headers() -> None:
    with pytest.raises(LoadError, match="API key"):
        Endpoint("http://host", api_key="k\r\nX: y")


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (HEAD + chunked(TOKEN), "connection lost"),
        (HEAD + chunked(TOKEN) + b"0\r\n\r\n", "stream ended early"),
        (HEAD + b"0\r\n\r\n", "empty answer"),
        (HEAD + chunked(b": ping\n\n") + b"0\r\n\r\n", "no tokens"),
        (HEAD + chunked(TOKEN + b"data: [DONE]\r\n\r\n") + b"0\r\n\r\n", None),
        (HEAD + chunked(b"data: {\n\n"), "malformed event"),
        (HEAD + chunked(b"data: 3\n\n"), "malformed event"),
        (b"HTTP/1.1 502 Bad\r\n\r\n<html>", "http 502"),
        (b"220 smtp ready\r\n\r\n", "not an HTTP/1.1 answer"),
        (b"", "connection lost"),
    ],
)
async def test_how_an_answer_ends(answer: bytes, error: str | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    endpoint = Endpoint(f"http://127.0.0.1:{port}", model="m")
    outcome = RequestOutcome(due=0.0)
    await endpoint.send(endpoint.prepare(b'"x"', 1), outcome)
    assert outcome.error == error
    endpoint.close()
    server.close()


async def test_an_idle_connection_that_the_server_closed_is_replaced() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + chunked(TOKEN + b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await reader.read(1)  # takes the next request up and drops it
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    endpoint = Endpoint(f"http://127.0.0.1:{port}", model="m")
    for _ in range(3):
        outcome = RequestOutcome(due=0.0)
        await endpoint.send(endpoint.prepare(b'"x"', 1), outcome)
        assert outcome.error is None
    assert connections == 3
    endpoint.close()
    server.close()


async def test_a_slow_answer_is_a_timeout_and_gives_up_its_connection() -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + chunked(TOKEN))
        await asyncio.gather(reader.read(), return_exceptions=True)
        gone.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    endpoint = Endpoint(f"http://127.0.0.1:{port}", model="m", timeout_s=0.1)
    outcome = RequestOutcome(due=0.0)
    await endpoint.send(endpoint.prepare(b'"x"', 1), outcome)
    assert outcome.error == "timeout"
    assert outcome.end - outcome.sent >= 0.1
    async with asyncio.timeout(60):
        await gone.wait()
    server.close()


async def test_nobody_listens() -> None:
    endpoint = Endpoint("http://127.0.0.1:9", model="m")
    outcome = RequestOutcome(due=0.0)
    await endpoint.send(endpoint.prepare(b'"x"', 1), outcome)
    assert outcome.error == "connection refused"

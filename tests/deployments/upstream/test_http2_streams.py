"""HTTP/2 upstreams that refuse, stall, leave and break, over real TLS sockets."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers_http2 import Http2Server, Link, http2_server
from helpers_upstream import said

from deployments.config.upstream import UpstreamConfig
from deployments.upstream.client import Upstream, UpstreamCall
from deployments.upstream.errors import UpstreamDownError, UpstreamSlowError

GOOD_TEXT = "one two"
Handler = Callable[[Link, int, dict[str, Any]], None]


def call(prompt: str = "hi") -> UpstreamCall:
    fields = {"model": "ours", "messages": [{"role": "user", "content": prompt}]}
    return UpstreamCall("/chat/completions", fields, ["r"], 1, 20)


async def text_of(upstream: Upstream, prompt: str = "hi") -> str:
    return "".join([delta.text async for deltas in upstream.generate(call(prompt)) for delta in deltas])


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    @asynccontextmanager
    async def made(
        handler: Handler, max_streams: int = 100, **settings: Any
    ) -> AsyncIterator[tuple[Upstream, Http2Server]]:
        async with http2_server(tmp_path, Http2Server(handler, max_streams)) as server:
            monkeypatch.setenv("SSL_CERT_FILE", str(server.cert))
            monkeypatch.setenv("THERE_KEY", "sk-there")
            upstream = Upstream(UpstreamConfig(name="u", base_url=server.base, api_key="env:THERE_KEY", **settings))
            try:
                yield upstream, server
            finally:
                await upstream.close()

    return made


async def test_requests_arrive_whole_however_large_they_are(there: Any) -> None:
    got: list[dict[str, Any]] = []

    def handler(link: Link, stream: int, body: dict[str, Any]) -> None:
        got.append(body)
        link.good(stream)

    prompts = [secrets.token_hex(size) for size in (10, 40_000, 400_000)]
    async with there(handler) as (upstream, server):
        texts = await asyncio.gather(*(text_of(upstream, prompt) for prompt in prompts))
        [link] = server.links
        head = link.headers[1]
    assert texts == [GOOD_TEXT] * 3
    assert {body["messages"][0]["content"] for body in got} == set(prompts)
    assert (
        head.items() >= {":method": "POST", ":path": "/v1/chat/completions", "authorization": "Bearer sk-there"}.items()
    )


async def test_what_the_server_has_not_looked_at_is_sent_again(there: Any) -> None:
    seen: list[str] = []

    def handler(link: Link, stream: int, body: dict[str, Any]) -> None:
        seen.append(body["messages"][0]["content"])
        if seen.count("refused") == 1 and seen[-1] == "refused":
            link.refuse(stream)
        elif seen.count("leaves") == 1 and seen[-1] == "leaves":
            link.go_away(stream - 2)
        else:
            link.good(stream)

    async with there(handler) as (upstream, server):
        for prompt in ("first", "refused", "leaves", "last"):
            assert await text_of(upstream, prompt) == GOOD_TEXT
        assert len(server.links) == 2
    assert seen == ["first", "refused", "refused", "leaves", "leaves", "last"]


async def test_who_refuses_for_ever_is_down(there: Any) -> None:
    async with there(lambda link, stream, body: link.refuse(stream)) as (upstream, _):
        with pytest.raises(UpstreamDownError):
            await text_of(upstream)


async def test_no_more_streams_on_a_connection_than_the_server_takes(there: Any) -> None:
    waiting: list[tuple[Link, int]] = []

    def handler(link: Link, stream: int, body: dict[str, Any]) -> None:
        waiting.append((link, stream))
        if len(waiting) == 5:
            for held, number in waiting:
                held.good(number)

    async with there(lambda link, stream, body: link.good(stream), max_streams=2) as (upstream, server):
        await text_of(upstream)  # from now on the server's settings are known
        server.on_request = handler
        assert await asyncio.gather(*(text_of(upstream) for _ in range(5))) == [GOOD_TEXT] * 5
        assert len({link for link, _ in waiting}) >= 3


@pytest.mark.parametrize("how", ["reset", "lost", "garbage"])
async def test_a_stream_that_breaks_off(how: str, there: Any) -> None:
    def handler(link: Link, stream: int, body: dict[str, Any]) -> None:
        link.begin(stream, said("one "))
        if how == "reset":
            link.h2.reset_stream(stream)
            link.flush()
        elif how == "lost":
            link.transport.close()
        else:
            link.transport.write(b"\0\0\1\1\4\0\0\0\0\xff")  # headers of no stream

    async with there(handler) as (upstream, server):
        with pytest.raises(UpstreamDownError):
            await text_of(upstream)
        server.on_request = lambda link, stream, body: link.good(stream)
        assert await text_of(upstream) == GOOD_TEXT


async def test_a_stream_that_stalls_fails_alone_and_is_reset(there: Any) -> None:
    ticking: set[asyncio.Task[None]] = set()

    async def tick(link: Link, stream: int) -> None:
        while len(link.resets) == 0:
            link.h2.send_data(stream, said("."))
            link.flush()
            await asyncio.sleep(0.05)
        link.h2.send_data(stream, said("!", finish="stop"), end_stream=True)
        link.flush()

    def handler(link: Link, stream: int, body: dict[str, Any]) -> None:
        link.begin(stream, said("one "))
        if body["messages"][0]["content"] != "stalls":
            ticking.add(asyncio.create_task(tick(link, stream)))

    async with there(handler, idle_s=3.0) as (upstream, server):
        kept = asyncio.create_task(text_of(upstream, "kept"))
        with pytest.raises(UpstreamSlowError):
            await text_of(upstream, "stalls")
        assert (await kept).endswith(".!")
        assert len(server.links[0].resets) == 1


async def test_unread_streams_do_not_stop_their_neighbours(there: Any) -> None:
    """What is sent to streams that nobody reads, or that were given up, is more than the connection's window in all."""
    piece = said("x" * 16_000)

    async def flood(link: Link, stream: int) -> None:
        left = 40 * 2**20 // len(piece)
        while left and stream not in link.resets and not link.closed:
            if link.h2.local_flow_control_window(stream) > len(piece):
                for at in range(0, len(piece), 16_000):
                    link.h2.send_data(stream, piece[at : at + 16_000])
                link.flush()
                left -= 1
            await asyncio.sleep(0)

    tasks: set[asyncio.Task[None]] = set()

    def handler(link: Link, stream: int, body: dict[str, Any]) -> None:
        if body["messages"][0]["content"] == "flood":
            link.begin(stream)
            tasks.add(asyncio.create_task(flood(link, stream)))
        else:
            link.good(stream)

    async with there(handler) as (upstream, server):
        floods = [upstream.generate(call("flood")) for _ in range(3)]
        for stream in floods:
            await anext(stream)
        assert await text_of(upstream) == GOOD_TEXT
        for stream in floods:
            await stream.aclose()
        for _ in range(30):  # each leaves something behind on its way
            stream = upstream.generate(call("flood"))
            await anext(stream)
            await stream.aclose()
        assert await text_of(upstream) == GOOD_TEXT
        assert len(server.links) == 1
        for task in tasks:
            task.cancel()


async def test_nobody_there(there: Any) -> None:
    async with there(lambda *_: None) as (upstream, _):
        port = upstream.config.base_url.split(":")[2].split("/")[0]
    other = Upstream(UpstreamConfig(name="u", base_url=f"https://127.0.0.1:{port}/v1"))
    answers = await asyncio.gather(*(text_of(other) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [UpstreamDownError] * 3
    await other.close()


async def test_the_first_requests_share_the_connection_that_is_being_made(there: Any) -> None:
    async with there(lambda link, stream, body: link.good(stream)) as (upstream, server):
        given_up = asyncio.create_task(text_of(upstream))
        await asyncio.sleep(0)
        others = asyncio.gather(*(text_of(upstream) for _ in range(5)))
        await asyncio.sleep(0)
        given_up.cancel()
        assert await others == [GOOD_TEXT] * 5 and len(server.links) == 1


async def test_a_certificate_that_nobody_vouches_for(there: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with there(lambda link, stream, body: link.good(stream)) as (upstream, _):
        monkeypatch.delenv("SSL_CERT_FILE")
        distrusting = Upstream(upstream.config)
        with pytest.raises(UpstreamDownError, match="CERTIFICATE_VERIFY_FAILED"):
            await text_of(distrusting)
        await distrusting.close()

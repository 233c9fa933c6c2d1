"""An upstream behind a real HTTP/2 server with TLS."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest
from helpers_front import front
from helpers_gateway import COUNT, COUNT_24, MODEL, FakeBackend, serving

from deployments.config.upstream import UpstreamConfig
from deployments.upstream.client import Upstream, UpstreamCall
from engine.types import FinishReason

FIELDS = {"model": MODEL, "prompt": COUNT, "temperature": 0, "ignore_eos": True}
CALL = UpstreamCall("/completions", FIELDS, ["r"], 1, 24)
_LOG = "log_format seen '$server_protocol $connection $status'; access_log {} seen;"


@contextmanager
def tls_upstream(
    backend: FakeBackend, folder: Path, trust: pytest.MonkeyPatch, http2: bool = True
) -> Iterator[tuple[UpstreamConfig, Path]]:
    """Its settings, and where nginx writes what it has seen: protocol, number of the connection, status."""
    seen = folder / "seen"

    def edit(text: str) -> str:
        text = text.replace("access_log off;", _LOG.format(seen))
        return text if http2 else text.replace("ssl http2;", "ssl;")

    with serving(backend) as inner, front("nginx", folder, inner, edit) as (base, cert):
        trust.setenv("SSL_CERT_FILE", str(cert))
        yield UpstreamConfig(name="there", base_url=f"{base}/v1"), seen


async def text_of(upstream: Upstream) -> str:
    return "".join([delta.text async for deltas in upstream.generate(CALL) for delta in deltas])


@pytest.mark.parametrize("http2", [True, False])
async def test_http2_where_it_is_offered(http2: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tls_upstream(FakeBackend(), tmp_path, monkeypatch, http2) as (config, seen):
        upstream = Upstream(config)
        assert await text_of(upstream) == COUNT_24
        assert await asyncio.gather(*(text_of(upstream) for _ in range(12))) == [COUNT_24] * 12
        await upstream.close()
    rows = [line.split() for line in seen.read_text().splitlines()]
    assert len(rows) == 13 and {status for _, _, status in rows} == {"200"}
    assert {protocol for protocol, _, _ in rows} == {"HTTP/2.0" if http2 else "HTTP/1.1"}
    if http2:
        assert len({connection for _, connection, _ in rows}) == 1


async def test_a_stream_that_is_given_up_leaves_its_neighbours_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = asyncio.Event()

    async def gate(step: int) -> None:
        while step >= 3 and not gone.is_set():
            await asyncio.sleep(0.01)

    backend = FakeBackend(gate=gate)
    with tls_upstream(backend, tmp_path, monkeypatch) as (config, seen):
        upstream = Upstream(config)
        async with aclosing(upstream.generate(CALL)) as kept, aclosing(upstream.generate(CALL)) as left:
            first = await anext(kept)
            await anext(left)
            await left.aclose()
            assert await asyncio.to_thread(backend.ended.wait, 60)  # the server has noticed, the connection is there
            gone.set()
            deltas = [*first, *[delta async for more in kept for delta in more]]
        assert "".join(delta.text for delta in deltas) == COUNT_24
        assert deltas[-1].finish_reason is FinishReason.LENGTH and deltas[-1].num_completion_tokens == 24
        assert await text_of(upstream) == COUNT_24
        await upstream.close()
    assert len({line.split()[1] for line in seen.read_text().splitlines()}) == 1

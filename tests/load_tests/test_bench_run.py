"""The generator against a server in the same process, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from deployments.cli.main import main
from load_tests.bench.bench import BenchConfig, BenchError, bench


class FakeServer:
    """`hold`: requests wait for it after their first token. Knobs are set by tests."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.running = self.peak = 0
        self.refuse: set[str] = set()
        self.fail_after: int | None = None
        self.hold: asyncio.Event | None = None
        self.url = ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m1"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.refuse & set(body):
            return web.json_response({"error": {"message": "?", "type": "invalid_request_error"}}, status=400)
        self.bodies.append(body)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            return await self._stream(request, body)
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        send: Callable[[dict[str, Any]], Awaitable[None]] = lambda event: response.write(  # noqa: E731
            b"data: " + json.dumps(event).encode() + b"\n\n"
        )
        for i in range(body["max_tokens"]):
            if self.fail_after is not None and i == self.fail_after and len(self.bodies) > 1:
                await send({"error": {"message": "lost", "type": "server_error"}})
                return response
            last = i == body["max_tokens"] - 1
            await send({"choices": [{"text": f" {i}", "finish_reason": "length" if last else None}]})
            if self.hold is not None and len(self.bodies) > 1:
                await self.hold.wait()
        if body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": 2 * len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
            await send({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    app = web.Application()
    app.router.add_get("/v1/models", fake.models)
    app.router.add_post("/v1/completions", fake.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


def quiet(done: int, total: int, rate: float) -> None:
    return


async def test_closed_loop_holds_its_concurrency_and_counts(server: FakeServer) -> None:
    config = BenchConfig(server.url, concurrency=4, requests=12, prompt_tokens=100, output_tokens=5)
    model, s = await bench(config, quiet)
    assert (model, s.succeeded, s.output_tokens, s.errors) == ("m1", 12, 60, {})
    assert server.peak <= 4
    assert s.prompt_tokens == 1200  # the probe showed two tokens a word
    assert len({body["prompt"] for body in server.bodies}) == 13
    assert all(body["ignore_eos"] and body["stream"] for body in server.bodies)
    assert set(s.latency_ms) == {"ttft", "itl", "tpot", "e2e"}


async def test_open_loop_never_waits_for_answers(server: FakeServer) -> None:
    server.hold = asyncio.Event()
    config = BenchConfig(server.url, concurrency=1, requests=20, output_tokens=2, rate=500.0)
    running = asyncio.create_task(bench(config, quiet))
    async with asyncio.timeout(60):
        while server.peak < 20:  # all are sent although none has ended
            await asyncio.sleep(0.01)
    server.hold.set()
    assert (await running)[1].succeeded == 20


@pytest.mark.parametrize("refused", [{"ignore_eos"}, {"ignore_eos", "stream_options"}])
async def test_extensions_a_server_refuses_are_given_up(server: FakeServer, refused: set[str]) -> None:
    server.refuse = refused
    _, s = await bench(BenchConfig(server.url, requests=3, output_tokens=4), quiet)
    assert (s.succeeded, s.output_tokens) == (3, 12)
    assert not refused & {key for body in server.bodies for key in body}


async def test_an_error_inside_a_stream_is_an_error(server: FakeServer) -> None:
    server.fail_after = 1
    _, s = await bench(BenchConfig(server.url, requests=3, output_tokens=4), quiet)
    assert s.errors == {"error event server_error": 3}


async def test_no_server() -> None:
    with pytest.raises(BenchError, match=r"http://127\.0\.0\.1:9/v1/models"):
        await bench(BenchConfig("http://127.0.0.1:9"), quiet)


async def test_a_server_that_always_refuses(server: FakeServer) -> None:
    server.refuse = {"prompt"}
    with pytest.raises(BenchError, match="first request failed: http 400 invalid_request_error"):
        await bench(BenchConfig(server.url), quiet)


async def test_command_writes_table_and_json(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    args = [
        "bench",
        "--base-url",
        server.url,
        "--requests",
        "4",
        "--output-tokens",
        "3",
        "--json",
        str(out),
        "--api-key",
        "k",
    ]
    assert await asyncio.to_thread(main, args) == 0
    assert "4 ok, 0 failed" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert (result["succeeded"], result["config"]["model"], result["config"]["api_key"]) == (4, "m1", None)


@pytest.mark.parametrize("args", [["--requests", "0"], ["--rate", "0"], ["--rate", "inf"], ["--concurrency", "x"]])
def test_command_refuses_impossible_loads(args: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", *args])

"""`sluice bench` against a server in the same process, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from helpers_load import FakeServer, fake_server

from deployments.cli.main import main
from load_tests import command
from load_tests.bench import BenchConfig, LoadError, bench
from load_tests.runner import Run

pytestmark = pytest.mark.sockets


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with fake_server() as fake:
        yield fake


def quiet(run: Run) -> None:
    return


async def test_closed_loop_holds_its_concurrency_and_counts(server: FakeServer) -> None:
    server.hold = asyncio.Event()
    config = BenchConfig(server.url, concurrency=4, requests=12, prompt_tokens=100, output_tokens=5)
    running = asyncio.create_task(bench(config, quiet))
    async with asyncio.timeout(60):
        while server.running < 4:
            await asyncio.sleep(0.01)
    server.hold.set()
    model, s = await running
    assert (model, s.succeeded, s.output_tokens, s.errors) == ("m1", 12, 60, {})
    assert server.peak == 4
    assert s.prompt_tokens == 1200
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 12
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


async def test_no_server() -> None:
    with pytest.raises(LoadError, match=r"http://127\.0\.0\.1:9/v1/models"):
        await bench(BenchConfig("http://127.0.0.1:9"), quiet)


async def test_a_server_that_always_refuses(server: FakeServer) -> None:
    server.refuse = {"prompt"}
    with pytest.raises(LoadError, match="first request failed: http 400 invalid_request_error"):
        await bench(BenchConfig(server.url), quiet)


async def test_command_writes_table_and_json(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    args = ["bench", "--base-url", server.url, "--requests", "4", "--output-tokens", "3", "--json", str(out)]
    assert await asyncio.to_thread(main, [*args, "--api-key", "k"], [command]) == 0
    assert "4 ok, 0 failed" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert (result["succeeded"], result["config"]["model"], result["config"]["api_key"]) == (4, "m1", None)


@pytest.mark.parametrize("args", [["--requests", "0"], ["--rate", "0"], ["--rate", "inf"], ["--concurrency", "x"]])
def test_command_refuses_impossible_loads(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["bench", *args], [command])
    assert f"argument {args[0]}: " in capsys.readouterr().err

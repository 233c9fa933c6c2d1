"""The comparison of gateways: its mock, its request, its arithmetic, and the config it runs ours with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import httpx
import pytest
import yaml

from deployments.cli.local_ray import free_port
from deployments.config.serve_file import ServeFile
from load_tests.errors import LoadError
from load_tests.gateways import __main__ as command
from load_tests.gateways import question
from load_tests.gateways.measure import Effort, GatewayFigures, Work, measure
from load_tests.gateways.mock import TOKENS, Mock
from load_tests.gateways.report import GatewayRatio, GatewayRow, added_ms, middle, ratio, tables
from load_tests.gateways.targets import TARGETS
from load_tests.report.tables import markdown
from load_tests.stand_in import STAND_IN

pytestmark = pytest.mark.sockets


@contextmanager
def mock() -> Iterator[int]:
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(loop.create_server(Mock, "127.0.0.1", 0))
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_the_mock_answers_as_openai_does() -> None:
    with mock() as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60.0) as http:
        for _ in range(2):  # on one connection
            whole = http.post(question.PATH, content=question.body(stream=False)).json()
            assert whole["choices"][0]["message"]["content"] == " word" * TOKENS
            events = http.post(question.PATH, content=question.body(stream=True)).text.split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""] and len(events) == TOKENS + 4
            deltas = [json.loads(e.removeprefix("data: "))["choices"][0]["delta"] for e in events[:-2]]
            assert "".join(d.get("content", "") for d in deltas) == " word" * TOKENS


@pytest.mark.parametrize("stream", [False, True])
def test_measuring(stream: bool) -> None:
    with mock() as port:
        figures = measure(port, stream, Effort(alone=5, loaded_s=0.05, concurrency=4))
    assert figures.failed == 0 and figures.requests_per_s > 0
    assert 0 < figures.first_p50_ms <= figures.latency_p50_ms <= figures.latency_p95_ms
    with pytest.raises(LoadError, match="no request succeeds"):
        measure(free_port(), stream, Effort(alone=1, loaded_s=0.01, concurrency=1))


def row(target: str, kind: str, latency: float, speed: float, number: int = 1, failed: int = 0) -> GatewayRow:
    return GatewayRow(target, "1", kind, number, GatewayFigures(latency, latency, latency, 1.0, speed, failed))


ROWS = [
    row("mock", "plain", 1.0, 9000.0),
    row("litellm", "plain", 19.0, 50.0, 1, failed=1),
    row("litellm", "plain", 21.0, 30.0, 2, failed=1),
    row("litellm", "plain", 20.0, 40.0, 3),
    row("sluicegate", "plain", 5.75, 200.0),
    row("mock", "streamed", 1.0, 9000.0),
    row("sluicegate", "streamed", 6.0, 200.0),
]


def test_ratios_are_of_medians_beyond_the_mock() -> None:
    found = middle(ROWS, "litellm", "plain")
    assert found is not None and (found.latency_p50_ms, found.requests_per_s, found.failed) == (20.0, 40.0, 2)
    assert added_ms(ROWS, "litellm", "plain") == 19.0
    assert ratio(ROWS, "sluicegate", "plain") == GatewayRatio(added=0.25, throughput=5.0)
    assert ratio(ROWS, "sluicegate", "streamed") == GatewayRatio(None, None)


def test_the_report_shows_everything() -> None:
    found = tables(ROWS, {"sluicegate": Work({"body": 0.1, "limit": 0.05}, 0.9, 1.8)})
    text = markdown(found, ["litellm: no network"])
    assert "| sluicegate 1 | 5.8 | 4.75 |" in text and "| 0.25 | 5.00 |" in text
    assert "| sluicegate | 0.10 | 0.05 | 0.90 | 1.80 |" in text and "- litellm: no network" in text


@pytest.mark.parametrize("name", [name for name in TARGETS.names() if name.startswith("sluicegate")])
def test_ours_runs_with_keys_tiers_and_limits(name: str, tmp_path: Path) -> None:
    target = TARGETS.get(name)(tmp_path / name)
    target.prepare(print)
    argv = target.launch(8000, 8001).argv
    file = ServeFile.load(argv[argv.index("--config") + 1])
    gateway = file.config.gateway
    assert gateway.has_limits and gateway.api_keys[0].key == question.KEY
    assert file.model_ids == (question.MODEL,)
    if target.upstream:
        assert file.config.upstreams[0].base_url == "http://127.0.0.1:8001/v1"
    else:
        assert file.config.models[0].engine.executor == STAND_IN


def test_litellm_runs_before_the_mock(tmp_path: Path) -> None:
    target = TARGETS.get("litellm")(tmp_path)
    assert target.upstream
    launch = target.launch(1, 2)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert config["model_list"][0]["litellm_params"]["api_base"] == "http://127.0.0.1:2/v1"
    assert config["general_settings"]["master_key"] == question.KEY and "1" in launch.argv


def test_the_command_measures_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "QUICK", Effort(alone=2, loaded_s=0.05, concurrency=2))
    monkeypatch.setattr(command, "busy_cores", lambda: 0.0)
    assert command.main(["--quick", "--targets", "mock", "--cache", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    data = json.loads((tmp_path / "out/gateways.json").read_text())
    assert [r["kind"] for r in data["rows"]] == ["plain", "streamed"] and not data["failures"]
    assert "## streamed" in (tmp_path / "out/gateways.md").read_text() and "plain\n" in capsys.readouterr().out
    assert command.main(["--targets", "nope", "--cache", str(tmp_path)]) == 2

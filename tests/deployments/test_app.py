"""The deployment graph and what it asks of the Ray cluster that it is to run on."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from deployments.app import build
from deployments.config.application import ServeConfig
from deployments.ray_serve import private


def config(**settings: Any) -> ServeConfig:
    return ServeConfig.model_validate({"models": [{"name": "m", "engine": {"model": "/m"}}], **settings})


def test_it_does_not_start_where_everybody_could_run_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "token_faults", lambda: ["Ray asks for no token"])
    with pytest.raises(PermissionError, match="asks for no token"):
        build(config())
    assert build(config(allow_unauthenticated_ray=True)) is not None


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "faults"), [("token", 0), ("disabled", 1)])
def test_whether_ray_asks_for_a_token(mode: str, faults: int) -> None:
    program = "from deployments.ray_serve.private import token_faults; print(*token_faults(), sep='\\n')"
    environment = {**os.environ, "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "a" * 64}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    said = done.stdout.split("\n")[:-1]
    assert len([line for line in said if line]) == faults
    assert all("sluice env" in line and "allow_unauthenticated_ray" in line for line in said if line)

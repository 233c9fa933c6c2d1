"""One trace against a real Serve with paced engines."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import yaml

from autoscaling.traces.trace import Trace
from load_tests.client import Endpoint
from load_tests.errors import LoadError
from load_tests.outcome import Outcome
from load_tests.peers.base import Launch
from load_tests.peers.demo import MODEL
from load_tests.peers.ours import SLUICE
from load_tests.peers.server import free_port, serving
from load_tests.processes import CpuMeter, below, title

TIMES = ("base_s", "prefill_token_s", "prefill_pair_s", "decode_seq_s", "decode_context_s")
LIMITS = ("max_num_batched_tokens", "max_num_seqs", "max_num_waiting")
_NAME = "paced"
_PROBES = 8
_PROBE_TOKENS = 64
_START_S = 240.0


@dataclass(frozen=True, slots=True)
class Measured:
    """`replicas`: how many processes there were, each second of the trace. `overhead_s`: what a request takes beyond
    its step on an idle pool. `startup_s`: from decision to service, the mean of those seen; None without any.
    `decisions`: the log's lines that changed the target. `cpu_s`: of the server, while the trace played."""

    ttft_s: Sequence[float]
    failed: Sequence[str]
    replicas: Sequence[int]
    overhead_s: float
    startup_s: float | None
    decisions: Sequence[Mapping[str, Any]]
    cpu_s: float


def measure(
    trace: Trace, profile: Mapping[str, Any], policy: Mapping[str, Any], folder: Path, say: Callable[[str], None]
) -> Measured:
    """Raises LoadError."""
    began = time.monotonic()
    port = free_port()
    config = folder / "serve.yaml"
    config.write_text(yaml.safe_dump(_config(profile, policy, port)))
    launch = Launch((*SLUICE, "serve", "--config", str(config)), _NAME, start_s=_START_S)
    with serving(launch, folder / "serve.log") as pid:
        logs = _logs(folder / "serve.log")
        say(f"the server is ready after {time.monotonic() - began:.0f} s")
        return asyncio.run(_connected(trace, profile, Endpoint(f"http://127.0.0.1:{port}", model=_NAME), pid, logs))


def _config(profile: Mapping[str, Any], policy: Mapping[str, Any], port: int) -> dict[str, Any]:
    engine = {
        "model": MODEL,
        "executor": "stand_in",
        "stand_in_times": {name: profile[name] for name in TIMES},
        "enable_prefix_caching": False,  # the simulator knows none
        "max_decode_slowdown": float("inf"),  # nor that
        "num_kv_blocks": profile["kv_tokens"] // 16,
        **{name: profile[name] for name in LIMITS},
    }
    model = {
        "name": _NAME,
        "num_cpus": 0.1,
        "routing_policy": "least_loaded",
        "max_queue_s": None,
        "autoscaling": dict(policy),
        "engine": engine,
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port, "keep_alive_timeout_s": 75},
        "logging_config": {"encoding": "JSON", "log_level": "INFO", "enable_access_log": False},
        "applications": [
            {
                "name": "sluicegate",
                "route_prefix": "/",
                "import_path": "deployments.app:build",
                "args": {"models": [model], "gateway": {"api_keys": []}},
            }
        ],
    }


def _logs(log: Path) -> Path:
    found = re.search(r"^logs (\S+)", log.read_text(), re.MULTILINE)
    if found is None:
        raise LoadError("the server did not say where its logs are")
    return Path(found[1])


async def _connected(trace: Trace, profile: Mapping[str, Any], endpoint: Endpoint, pid: int, logs: Path) -> Measured:
    try:
        return await _play(trace, profile, endpoint, pid, logs)
    finally:
        endpoint.close()  # while its loop runs


async def _play(trace: Trace, profile: Mapping[str, Any], endpoint: Endpoint, pid: int, logs: Path) -> Measured:
    overhead_s = await _overhead(profile, endpoint)
    requests = [
        endpoint.prepare(orjson.dumps([9] * int(prompt)), int(output))
        for prompt, output in zip(trace.prompt_tokens, trace.output_tokens, strict=True)
    ]
    replicas: list[int] = []
    meter = CpuMeter(below(pid), {})
    began = time.perf_counter()
    counting = asyncio.create_task(_count(pid, replicas))
    outcomes = [Outcome(began + at_s) for at_s in (trace.at_s - trace.at_s[0]).tolist()]
    async with asyncio.TaskGroup() as tasks:
        for outcome, request in zip(outcomes, requests, strict=True):
            await asyncio.sleep(max(0.0, outcome.due - time.perf_counter()))
            tasks.create_task(endpoint.send(request, outcome))
        counting.cancel()
    cpu_s = sum(meter.read().values())
    changes = _decisions(logs)
    startups = [d["signals"]["startup_s"] for d in changes if "startup_s" in d["signals"]]
    return Measured(
        [o.ttft_s for o in outcomes if o.error is None],
        [o.error for o in outcomes if o.error is not None],
        replicas,
        overhead_s,
        _startup_s(changes, startups),
        [d for d in changes if d["from"] != d["to"]],
        cpu_s,
    )


def _startup_s(decisions: Sequence[Mapping[str, Any]], said: Sequence[float]) -> float | None:
    """The mean of what the controller measured; it says the slowest of the last few."""
    scaled_up = any(d["to"] > d["from"] for d in decisions)
    return float(np.mean(said[-3:])) if scaled_up and said else None


async def _overhead(profile: Mapping[str, Any], endpoint: Endpoint) -> float:
    request = endpoint.prepare(orjson.dumps([9] * _PROBE_TOKENS), 2)
    step_s = profile["base_s"] + _PROBE_TOKENS * (
        profile["prefill_token_s"] + profile["prefill_pair_s"] * _PROBE_TOKENS / 2
    )
    taken = []
    for _ in range(_PROBES):
        outcome = Outcome(time.perf_counter())
        await endpoint.send(request, outcome)
        if outcome.error is not None:
            raise LoadError(f"the server does not answer: {outcome.error}")
        taken.append(outcome.ttft_s - step_s)
    return max(0.0, float(np.median(taken)))


async def _count(pid: int, replicas: list[int]) -> None:
    """Until cancelled."""
    while True:
        replicas.append(sum("ModelReplica" in title(child) for child in below(pid)))
        await asyncio.sleep(1.0)


def _decisions(logs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in logs.glob("autoscaling_*.log") for line in file.read_text().splitlines()]

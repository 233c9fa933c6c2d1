"""One trace against a real Serve with paced engines."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import yaml

from autoscaling.traces.trace import Trace
from deployments.cli.local_ray import free_port
from deployments.cli.processes import command, descendants
from load_tests.client import Endpoint
from load_tests.errors import LoadError
from load_tests.outcome import RequestOutcome
from load_tests.peers.demo import MODEL
from load_tests.processes import CpuMeter
from load_tests.servers import SLUICE, Launch, config_file, serving
from load_tests.stand_in import STAND_IN

TIMES = ("base_s", "prefill_token_s", "prefill_pair_s", "decode_seq_s", "decode_context_s")
LIMITS = ("max_num_batched_tokens", "max_num_seqs", "max_num_waiting")
_NAME = "paced"
_PROBES = 8
_PROBE_TOKENS = 64
_START_S = 240.0
_STARTED = re.compile(r"deployment='ModelReplica-[^\n]* started successfully [^\n]* after ([0-9.]+)s \(PID")
_NOTICED_S = 0.45  # the controller acts on a decision a tenth or two later; a gateway asks for replicas twice a second


@dataclass(frozen=True, slots=True)
class Measured:
    """`replicas`: how many were wanted or still there, each second of the trace. `overhead_s`: what a request takes
    beyond its step on an idle pool. `startups_s`: from decision to service, of those seen in turn. `decisions`: the
    log's lines that changed the target. `cpu_s`: of the server, while the trace played."""

    ttft_s: Sequence[float]
    failed: Sequence[str]
    replicas: Sequence[int]
    overhead_s: float
    startups_s: Sequence[float]
    decisions: Sequence[Mapping[str, Any]]
    cpu_s: float

    @property
    def startup_s(self) -> float | None:
        """The mean; None without any."""
        return float(np.mean(self.startups_s)) if self.startups_s else None


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready. `logs`: where Serve's are."""

    endpoint: Endpoint
    pid: int
    logs: Path


def measure(
    trace: Trace,
    profile: Mapping[str, Any],
    policy: Mapping[str, Any],
    folder: Path,
    say: Callable[[str], None],
    engine: Mapping[str, Any] | None = None,
) -> Measured:
    """`engine`: settings of a real one; without them the profile's stand-in. Raises LoadError."""
    with running(serve_config(profile, policy, free_port(), engine), folder, say) as server:
        return asyncio.run(_connected(trace, profile, server))


@contextmanager
def running(config: Mapping[str, Any], folder: Path, say: Callable[[str], None]) -> Iterator[Running]:
    """Raises LoadError."""
    began = time.monotonic()
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(dict(config)))
    launch = Launch((*SLUICE, "serve", "--config", str(file)), _NAME, start_s=_START_S)
    with serving(launch, folder / "serve.log") as pid:
        logs = _logs(folder / "serve.log")
        say(f"the server is ready after {time.monotonic() - began:.0f} s")
        url = f"http://127.0.0.1:{config['http_options']['port']}"
        yield Running(Endpoint(url, model=_NAME), pid, logs)


def serve_config(
    profile: Mapping[str, Any], policy: Mapping[str, Any] | None, port: int, engine: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Without a policy there is one replica."""
    engine = engine or {
        "model": MODEL,
        "executor": STAND_IN,
        "executor_options": {name: profile[name] for name in TIMES},
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
        "autoscaling": None if policy is None else dict(policy),
        "engine": dict(engine),
    }
    return config_file({"models": [model], "gateway": {"api_keys": []}}, port)


def _logs(log: Path) -> Path:
    found = re.search(r"^logs (\S+)", log.read_text(), re.MULTILINE)
    if found is None:
        raise LoadError("the server did not say where its logs are")
    return Path(found[1])


async def _connected(trace: Trace, profile: Mapping[str, Any], server: Running) -> Measured:
    try:
        return await _play(trace, profile, server.endpoint, server.pid, server.logs)
    finally:
        server.endpoint.close()  # while its loop runs


async def _play(trace: Trace, profile: Mapping[str, Any], endpoint: Endpoint, pid: int, logs: Path) -> Measured:
    requests = [
        endpoint.prepare(orjson.dumps([9] * int(prompt)), int(output))
        for prompt, output in zip(trace.prompt_tokens, trace.output_tokens, strict=True)
    ]
    processes: list[tuple[float, int]] = []
    meter = CpuMeter(descendants(pid), {})
    began = time.perf_counter()
    counting = asyncio.create_task(_count(pid, processes))
    outcomes = [RequestOutcome(began + at_s) for at_s in (trace.at_s - trace.at_s[0]).tolist()]
    async with asyncio.TaskGroup() as tasks:
        for outcome, request in zip(outcomes, requests, strict=True):
            await asyncio.sleep(max(0.0, outcome.due - time.perf_counter()))
            tasks.create_task(endpoint.send(request, outcome))
        counting.cancel()
    cpu_s = sum(meter.read().values())
    changes = _decisions(logs)
    overhead_s = await _overhead(profile, endpoint)  # not before: what the policy learns from is the trace alone
    return Measured(
        [o.ttft_s for o in outcomes if o.error is None],
        [o.error for o in outcomes if o.error is not None],
        [max(count, wanted_at(changes, at_s)) for at_s, count in processes],
        overhead_s,
        startups_of(logs),
        [d for d in changes if d["from"] != d["to"]],
        cpu_s,
    )


def startups_of(logs: Path) -> list[float]:
    """Of the replicas that came later than the server. The policy's own signal is the slowest of the last few."""
    text = "".join(file.read_text() for file in logs.glob("controller_*.log"))
    return [float(found[1]) + _NOTICED_S for found in _STARTED.finditer(text)][1:]


async def _overhead(profile: Mapping[str, Any], endpoint: Endpoint) -> float:
    request = endpoint.prepare(orjson.dumps([9] * _PROBE_TOKENS), 2)
    step_s = profile["base_s"] + _PROBE_TOKENS * (
        profile["prefill_token_s"] + profile["prefill_pair_s"] * _PROBE_TOKENS / 2
    )
    taken = []
    for _ in range(_PROBES):
        outcome = RequestOutcome(time.perf_counter())
        await endpoint.send(request, outcome)
        if outcome.error is not None:
            raise LoadError(f"the server does not answer: {outcome.error}")
        taken.append(outcome.ttft_s - step_s)
    return max(0.0, float(np.median(taken)))


def wanted_at(decisions: Sequence[Mapping[str, Any]], at_s: float) -> int:
    """What was wanted then: a replica costs from the decision on, and its process gets its title later."""
    return next((int(d["to"]) for d in reversed(decisions) if d["time"] <= at_s), 1)


async def _count(pid: int, processes: list[tuple[float, int]]) -> None:
    """Until cancelled: when it was, and how many there were."""
    while True:
        processes.append((time.time(), sum("ModelReplica" in command(child) for child in descendants(pid))))
        await asyncio.sleep(1.0)


def _decisions(logs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in logs.glob("autoscaling_*.log") for line in file.read_text().splitlines()]

"""The demo model itself, one thread a replica, from one replica to two: what validate does with engines that only take
the time of one, once for real. Two cores hold no more."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from autoscaling.traces.trace import Trace, load_trace
from deployments.cli.local_ray import free_port
from load_tests.autoscale.real import Measured, Running, measure, running, serve_config
from load_tests.autoscale.traffic import within, write_trace
from load_tests.autoscale.validate import TraceComparison, comparison, for_real, markdown, predict
from load_tests.client import Endpoint
from load_tests.errors import LoadError
from load_tests.outcome import RequestOutcome
from load_tests.peers.demo import MODEL
from load_tests.servers import SLUICE

_LIMITS: Mapping[str, Any] = {"max_num_batched_tokens": 256, "max_num_seqs": 16, "max_num_waiting": 4096}
_KV_TOKENS = 16_000
ENGINE: Mapping[str, Any] = {
    "model": MODEL,
    "device": "cpu",
    "num_threads": 1,
    "enable_prefix_caching": False,  # the simulator knows none
    "max_decode_slowdown": float("inf"),  # nor that
    "num_kv_blocks": _KV_TOKENS // 16,
    **_LIMITS,
}
POLICY: Mapping[str, Any] = {
    "policy": "slo",
    "min_replicas": 1,
    "max_replicas": 2,
    "params": {"ttft_slo_s": 2.0, "startup_s": 8.0},
    "guardrails": {"downscale_window_s": 60.0},
}
_SEQUENTIAL = ((32, 24), (64, 24), (128, 24), (256, 24), (384, 24), (512, 24))  # tokens of prompt and answer
_TOGETHER = ((4, 64, 32), (4, 256, 16), (8, 32, 48))  # so many at once
_NEIGHBOUR = "neighbour"
_NEIGHBOURS, _NEIGHBOUR_PROMPT, _NEIGHBOUR_OUTPUT = 3, 160, 24  # requests at once, so that it is never idle
_LOW_S, _LOW, _HIGH = 10.0, 0.3, 1.3  # of what one replica can serve, and for how long at first
_BATCH = 4.0  # sequences that share a step's fixed part, about
_PROMPT, _OUTPUT = 160.0, 24.0  # medians


def one_to_two(seconds: float, seed: int, repeat: int, say: Callable[[str], None]) -> tuple[str, bool]:
    """What was predicted and what was seen, as Markdown, and whether they are close. Raises LoadError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        known = calibrate(folder, say)
        trace = step_trace(known, seconds, seed)
        file = folder / "trace.csv"
        write_trace(trace, file)
        runs = for_real(trace, repeat, say, lambda: measure(trace, known, POLICY, folder, say, ENGINE))
        result = compared(trace, load_trace(file), known, runs)
    changes = [", ".join(f"{d['from']} to {d['to']} ({d['why']})" for d in run.decisions) or "none" for run in runs]
    began = ", ".join(f"{s:.1f} s" for run in runs for s in run.startups_s) or "never"
    lines = (
        markdown([result]),
        f"Load: {', '.join(trace.notes)}; {result.failed} requests failed. SLO: TTFT within "
        f"{POLICY['params']['ttft_slo_s']:g} s.",
        f"Calibrated: {_said(known)}.",
        f"Changes: {'; '.join(changes)}. From decision to service: {began}.",
    )
    return "\n\n".join(lines), result.close


def compared(trace: Trace, played: Trace, known: Mapping[str, Any], runs: Sequence[Measured]) -> TraceComparison:
    startups_s = [run.startup_s or POLICY["params"]["startup_s"] for run in runs]
    predicted = [predict(played, run.overhead_s, s, known, POLICY) for run, s in zip(runs, startups_s, strict=True)]
    return comparison(trace, runs, float(np.mean(startups_s)), predicted, POLICY)


def calibrate(folder: Path, say: Callable[[str], None]) -> Mapping[str, Any]:
    """Step times of one replica by its gateway's request log, alone and beside another one that is busy. Raises
    LoadError."""
    base, profile = folder / "limits.json", folder / "profile.json"
    alone, beside = folder / "alone.log", folder / "beside.log"
    base.write_text(json.dumps({**_LIMITS, "kv_tokens": _KV_TOKENS, "about": "the demo model"}))
    config = serve_config({}, None, free_port(), ENGINE)
    models = config["applications"][0]["args"]["models"]
    models.append({**models[0], "name": _NEIGHBOUR})
    with running(config, folder, say) as server:
        began_s = asyncio.run(_probes(server))
        [journal] = server.logs.glob("requests_*.log")
        lines = journal.read_text().splitlines()
    for file, part in zip((alone, beside), split(lines, server.endpoint.model, began_s), strict=True):
        file.write_text("\n".join(part))
    command = (*SLUICE, "autoscale", "fit", alone, "--beside", beside, "--base", base, "--out", profile)
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LoadError(f"sluice autoscale fit: {done.stderr.strip()[-500:]}")
    found: Mapping[str, Any] = json.loads(profile.read_text())
    say(f"one replica: {_said(found)}; {done.stderr.strip()}")
    return found


def split(lines: Sequence[str], model: str, at_s: float) -> tuple[list[str], list[str]]:
    """Those of a request log that are of one model: what came before a moment, by the clock, and later."""
    parts: tuple[list[str], list[str]] = ([], [])
    for line in lines:
        row = json.loads(line)
        if row["model"] == model:
            parts[row["time"] - row["total_s"] >= at_s].append(line)
    return parts


async def _probes(server: Running) -> float:
    """Without the neighbour, then beside it: from when on."""
    neighbour = Endpoint(server.endpoint.base_url, model=_NEIGHBOUR)
    try:
        await _ask(neighbour, _NEIGHBOUR_PROMPT, _NEIGHBOUR_OUTPUT)  # what only a first request costs
        await _probe(server.endpoint)
        began_s = time.time()
        async with _busy(neighbour):
            await _probe(server.endpoint)
        return began_s
    finally:
        server.endpoint.close()
        neighbour.close()


@asynccontextmanager
async def _busy(endpoint: Endpoint) -> AsyncIterator[None]:
    over = asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            await _ask(endpoint, _NEIGHBOUR_PROMPT, _NEIGHBOUR_OUTPUT)

    tasks = [asyncio.create_task(ask()) for _ in range(_NEIGHBOURS)]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*tasks)


async def _probe(endpoint: Endpoint) -> None:
    for prompt, output in _SEQUENTIAL:
        await _ask(endpoint, prompt, output)
    for at_once, prompt, output in _TOGETHER:
        await asyncio.gather(*(_ask(endpoint, prompt, output) for _ in range(at_once)))
    for prompt, output in reversed(_SEQUENTIAL):
        await _ask(endpoint, prompt, output)


async def _ask(endpoint: Endpoint, prompt: int, output: int) -> None:
    outcome = RequestOutcome(time.perf_counter())
    await endpoint.send(endpoint.prepare(orjson.dumps([9] * prompt), output), outcome)
    if outcome.error is not None:
        raise LoadError(f"the server does not answer: {outcome.error}")


def step_trace(profile: Mapping[str, Any], seconds: float, seed: int) -> Trace:
    """Poisson arrivals, at first few, then more than one replica with this profile can serve."""
    rng = np.random.default_rng(seed)
    work_s = (
        profile["prefill_token_s"] * _PROMPT
        + profile["prefill_pair_s"] * _PROMPT**2 / 2
        + _OUTPUT * (profile["base_s"] / _BATCH + profile["decode_seq_s"] + profile["decode_context_s"] * _PROMPT)
    )
    low, high = _LOW / work_s, _HIGH / work_s
    at_s = np.concatenate([_poisson(rng, low, 0.0, _LOW_S), _poisson(rng, high, _LOW_S, seconds)])
    if not len(at_s):
        raise LoadError(f"{seconds:g} s are too few for any request")
    prompt = np.maximum(1, rng.lognormal(np.log(_PROMPT), 0.4, len(at_s))).astype(np.int64)
    output = np.maximum(2, rng.lognormal(np.log(_OUTPUT), 0.3, len(at_s))).astype(np.int64)
    notes = (f"{low:.2f} requests/s for {_LOW_S:g} s, then {high:.2f}",)
    return within(Trace("step", at_s, prompt, output, seconds, notes), 512, 64)


def _poisson(
    rng: np.random.Generator, rate: float, from_s: float, to_s: float
) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.sort(rng.uniform(from_s, to_s, rng.poisson(rate * (to_s - from_s))))


def _said(profile: Mapping[str, Any]) -> str:
    return (
        f"{profile['base_s'] * 1e3:.1f} ms a step, {profile['prefill_token_s'] * 1e3:.2f} ms a prompt token, "
        f"{profile['decode_seq_s'] * 1e3:.1f} ms a sequence that decodes, all {1 + profile['contention']:.2f} times as "
        "long beside a busy replica"
    )

"""The demo model itself, one thread a replica, from one replica to two: what validate does with engines that only take
the time of one, once for real. Two cores hold no more."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from autoscaling.traces.trace import Trace, load_trace
from load_tests.autoscale.real import Running, measure, running, serve_config
from load_tests.autoscale.traffic import within, write_trace
from load_tests.autoscale.validate import Comparison, markdown, predict, seen
from load_tests.errors import LoadError
from load_tests.outcome import Outcome
from load_tests.peers.demo import MODEL
from load_tests.peers.ours import SLUICE
from load_tests.peers.server import free_port

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
_LOW_S, _LOW, _HIGH = 10.0, 0.3, 1.3  # of what one replica can serve, and for how long at first
_BATCH = 4.0  # sequences that share a step's fixed part, about
_PROMPT, _OUTPUT = 160.0, 24.0  # medians


def one_to_two(seconds: float, seed: int, say: Callable[[str], None]) -> str:
    """What was predicted and what was seen, as Markdown. Raises LoadError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        known = calibrate(folder, say)
        trace = step_trace(known, seconds, seed)
        file = folder / "trace.csv"
        write_trace(trace, file)
        say(f"{len(trace)} requests in {trace.duration_s:.0f} s")
        run = measure(trace, known, POLICY, folder, say, ENGINE)
        if not run.ttft_s:
            raise LoadError(f"no request was answered: {run.failed[:1]}")
        startup_s = run.startup_s if run.startup_s is not None else POLICY["params"]["startup_s"]
        predicted = predict(load_trace(file), run.overhead_s, startup_s, known, POLICY)
        result = Comparison(
            trace.name,
            trace.notes,
            len(trace),
            len(run.failed),
            run.overhead_s,
            startup_s,
            run.cpu_s / trace.duration_s,
            (seen(run, len(trace), POLICY),),
            predicted,
        )
    changes = ", ".join(f"{d['from']} to {d['to']} ({d['why']})" for d in run.decisions) or "none"
    return "\n".join(
        (
            markdown([result]),
            "",
            f"Load: {', '.join(trace.notes)}; {len(run.failed)} requests failed. SLO: TTFT within "
            f"{POLICY['params']['ttft_slo_s']:g} s.",
            "",
            f"Calibrated on one replica: {_said(known)}.",
            "",
            f"Changes: {changes}. From decision to service {startup_s:.1f} s.",
        )
    )


def calibrate(folder: Path, say: Callable[[str], None]) -> Mapping[str, Any]:
    """Step times of one replica by its gateway's request log. Raises LoadError."""
    base, profile = folder / "limits.json", folder / "profile.json"
    base.write_text(json.dumps({**_LIMITS, "kv_tokens": _KV_TOKENS, "about": "the demo model"}))
    with running(serve_config({}, None, free_port(), ENGINE), folder, say) as server:
        asyncio.run(_probe(server))
        [journal] = server.logs.glob("requests_*.log")
        command = (*SLUICE, "autoscale", "fit", str(journal), "--base", str(base), "--out", str(profile))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LoadError(f"sluice autoscale fit: {done.stderr.strip()[-500:]}")
    found: Mapping[str, Any] = json.loads(profile.read_text())
    say(f"one replica: {_said(found)}; {done.stderr.strip()}")
    return found


async def _probe(server: Running) -> None:
    try:
        for prompt, output in _SEQUENTIAL:
            await _ask(server, prompt, output)
        for at_once, prompt, output in _TOGETHER:
            await asyncio.gather(*(_ask(server, prompt, output) for _ in range(at_once)))
        for prompt, output in reversed(_SEQUENTIAL):
            await _ask(server, prompt, output)
    finally:
        server.endpoint.close()


async def _ask(server: Running, prompt: int, output: int) -> None:
    outcome = Outcome(time.perf_counter())
    await server.endpoint.send(server.endpoint.prepare(orjson.dumps([9] * prompt), output), outcome)
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
        f"{profile['decode_seq_s'] * 1e3:.1f} ms a sequence that decodes"
    )

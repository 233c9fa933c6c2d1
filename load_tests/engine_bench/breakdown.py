"""Where a decode step goes: matrix products, attention, other kernels, sampling, scheduling, text, and the Python
in between."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from engine.attention.base import BACKENDS
from engine.kernels.base import KERNELS
from engine.layers.embedding import Embedding
from engine.layers.linear import Part
from engine.live import LiveRequest
from engine.registry import Registry
from engine.runner.graphs import StepGraph
from engine.runner.sampler import Sampler
from engine.scheduler.scheduler import Scheduler
from engine.text.output import TextStream
from load_tests.engine_bench.bench import Bench
from load_tests.engine_bench.figures import Figures, MeasuredRow
from load_tests.engine_bench.patch import Method
from load_tests.engine_bench.subject import Subject
from load_tests.engine_bench.timers import Timers

FORWARD = ("gemm", "attention", "kernels")
AROUND = ("sampling", "scheduling", "text")
REPLAY = "replay"
_CONTEXT = 256
_BLOCK = 5  # steps between switching the timers on and off, which itself makes the next calls slower
_COLUMNS = {
    "batch": "batch",
    "step_ms": "step ms",
    "gemm": "GEMM %",
    "attention": "attention %",
    "kernels": "other kernels %",
    "sampling": "sampling %",
    "scheduling": "scheduling %",
    "text": "text %",
    "python": "Python between %",
    "forward": "forward",
}


def run(bench: Bench) -> Figures:
    rows: list[MeasuredRow] = []
    for batch in (1, 8) if bench.quick else (1, 8, 32):
        if not bench.subject.fits(batch, _CONTEXT):
            rows.append({"batch": batch})
            continue
        found = measure(bench.subject, batch, 2 if bench.quick else 8)
        bench.say(f"breakdown, batch {batch}: {found.shares['gemm']:.0%} of {found.step_s * 1e3:.1f} ms are GEMM")
        rows.append(
            {"batch": batch, "step_ms": found.step_s * 1e3}
            | {kind: share * 100 for kind, share in found.shares.items()}
            | {"forward": "replayed" if found.replayed else "layer by layer"}
        )
    return Figures(
        "breakdown",
        f"Where a decode step goes, at context {_CONTEXT}",
        _COLUMNS,
        rows,
        (
            "step: measured without timers; shares: time within the timed calls over it, their thin Python wrappers "
            "included; between: the rest",
            "replayed: a captured step is one native call, whose time is split as the same batch spends "
            "it layer by layer, less the Python of each layer's call",
        ),
    )


@dataclass(frozen=True, slots=True)
class Breakdown:
    """`shares` of step_s by kind, and "python": what is left, at least 0."""

    step_s: float
    shares: dict[str, float]
    replayed: bool


def measure(subject: Subject, batch: int, blocks: int) -> Breakdown:
    """Steps without and with timers in turn, then the same batch's forward pass alone, layer by layer."""
    plain: list[float] = []
    timers = Timers(timed_methods())
    stepped: list[tuple[Counter[str], Counter[str]]] = []
    eager: list[tuple[Counter[str], Counter[str]]] = []
    with subject.decoding(batch, _CONTEXT) as (engine, executor):
        engine.step()
        for _ in range(blocks):
            for _ in range(_BLOCK):
                start = time.perf_counter()
                engine.step()
                plain.append(time.perf_counter() - start)
            with timers.on():
                _times(engine.step, timers, stepped)
        plan = executor.last
        assert plan is not None
        with timers.on():
            for _ in range(blocks):
                _times(lambda: subject.forward(plan), timers, eager)
    in_step = _typical(stepped)
    calls = eager[-1][1]
    replayed = stepped[-1][1]["gemm"] < calls["gemm"]
    if replayed:
        in_step |= split_replay(in_step[REPLAY], _typical(eager), calls)
    step_s = median(plain)
    shares = {kind: in_step[kind] / step_s for kind in (*FORWARD, *AROUND)}
    return Breakdown(step_s, {**shares, "python": max(0.0, 1 - sum(shares.values()))}, replayed)


def split_replay(replay_s: float, eager: Mapping[str, float], calls: Mapping[str, int]) -> dict[str, float]:
    """Seconds of a replayed forward pass by kind of FORWARD. What the layers take longer when they are called one by
    one is the calls' own Python, equally much for each call."""
    longer = max(0.0, sum(eager[kind] for kind in FORWARD) - replay_s)
    per_call = longer / sum(calls[kind] for kind in FORWARD)
    kernels = {kind: max(0.0, eager[kind] - calls[kind] * per_call) for kind in FORWARD}
    most = replay_s / (sum(kernels.values()) or 1.0)
    return {kind: s * min(1.0, most) for kind, s in kernels.items()}


def timed_methods() -> dict[Method, str]:
    methods: dict[Method, str] = {
        (Part, "__call__"): "gemm",
        (Embedding, "__call__"): "kernels",
        (StepGraph, "hidden"): REPLAY,
        (StepGraph, "logits"): REPLAY,
        (Sampler, "sample"): "sampling",
        (Scheduler, "schedule"): "scheduling",
        (Scheduler, "update"): "scheduling",
        (TextStream, "push"): "text",
        (LiveRequest, "delta"): "text",
    }
    for cls in _loadable(BACKENDS):
        methods |= {(cls, name): "attention" for name in ("plan", "run")}
    for cls in _loadable(KERNELS):
        ops = ("rms_norm", "rms_norm_add", "rope", "silu_mul", "gelu_mul", "scale", "softcap")
        methods |= {(cls, name): "kernels" for name in ops}
    return {(cls, name): kind for (cls, name), kind in methods.items() if name in vars(cls)}


def _loadable(registry: Registry[Any]) -> list[type]:
    """Those whose modules can be imported here: the others are not in use."""
    classes: list[type] = []
    for name in registry.names():
        with suppress(ImportError):
            classes.append(registry.get(name))
    return classes


def _times(run: Callable[[], object], timers: Timers, into: list[tuple[Counter[str], Counter[str]]]) -> None:
    """_BLOCK runs, after one that is not counted."""
    run()
    timers.take()
    for _ in range(_BLOCK):
        run()
        into.append(timers.take())


def _typical(taken: list[tuple[Counter[str], Counter[str]]]) -> dict[str, float]:
    """Median seconds by kind."""
    return {kind: median(seconds[kind] for seconds, _ in taken) for kind in (*FORWARD, *AROUND, REPLAY)}

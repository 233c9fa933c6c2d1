"""Decode step time, against the time that memory and the linear layers alone would take."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from load_tests.engine_bench.bench import Bench
from load_tests.engine_bench.figures import Figures, MeasuredRow
from load_tests.engine_bench.linears import Linears, linears_of
from load_tests.engine_bench.memory import read_bandwidth
from load_tests.engine_bench.timing import samples, seconds

_STEPS = 64
_COLUMNS = {
    "batch": "batch",
    "context": "context",
    "step_ms": "step ms",
    "tokens_per_s": "tokens/s",
    "read_mb": "reads MB",
    "floor_ms": "floor ms",
    "step_over_floor": "step/floor",
    "linear_ms": "linear ms",
    "step_over_linear": "step/linear",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement; the times are None where the cache does not hold so much. `read_bytes`: of weights and K/V that
    a step reads."""

    batch: int
    context: int
    step_s: float | None = None
    linear_s: float | None = None
    read_bytes: float | None = None


def run(bench: Bench) -> list[Figures]:
    subject = bench.subject
    before = _bandwidth(bench)
    cases: list[Case] = []
    for batch in (1, 8) if bench.quick else (1, 8, 32, 64):
        linears = linears_of(subject, batch)
        for context in (128, 1024) if bench.quick else (128, 1024, 4096):
            if subject.fits(batch, context):
                cases.append(_measure(bench, batch, context, linears))
            else:
                bench.say(f"decode, batch {batch}, context {context}: does not fit the cache")
                cases.append(Case(batch, context))
    after = _bandwidth(bench)
    bandwidth = max(before, after)
    return [
        Figures(
            "decode",
            "Decode steps of the whole engine: scheduling, forward, sampling, text",
            _COLUMNS,
            [_row(case, bandwidth) for case in cases],
            (
                f"floor: bytes of weights and K/V that a step reads, at {bandwidth / 1e9:.1f} GB/s, the best read "
                f"bandwidth seen before ({before / 1e9:.1f}) and after ({after / 1e9:.1f})",
                "linear: the model's linear layers and head alone, called one after the other from Python, at the same "
                "batch",
                "wanted: step/floor at most 1.5 at batch 1, step/linear at most 1.4 at batch 32",
            ),
        )
    ]


def _measure(bench: Bench, batch: int, context: int, linears: Linears) -> Case:
    subject = bench.subject
    with subject.decoding(batch, context) as (engine, _):
        taken = samples(engine.step, bench.budget_s, least=4, most=_STEPS)
    linear_s = seconds(linears, bench.budget_s / 2)
    step_s = median(taken)
    kv_bytes = batch * (context + len(taken) / 2) * subject.kv_bytes_per_token
    bench.say(
        f"decode, batch {batch}, context {context}: {step_s * 1e3:.1f} ms, its linear layers {linear_s * 1e3:.1f} ms"
    )
    return Case(batch, context, step_s, linear_s, linears.weight_bytes + kv_bytes)


def _row(case: Case, bandwidth: float) -> MeasuredRow:
    if case.step_s is None or case.linear_s is None or case.read_bytes is None:
        return {"batch": case.batch, "context": case.context}
    floor_s = case.read_bytes / bandwidth
    return {
        "batch": case.batch,
        "context": case.context,
        "step_ms": case.step_s * 1e3,
        "tokens_per_s": case.batch / case.step_s,
        "read_mb": case.read_bytes / 1e6,
        "floor_ms": floor_s * 1e3,
        "step_over_floor": case.step_s / floor_s,
        "linear_ms": case.linear_s * 1e3,
        "step_over_linear": case.step_s / case.linear_s,
    }


def _bandwidth(bench: Bench) -> float:
    found = read_bandwidth(bench.budget_s, bench.quick)
    bench.say(f"read bandwidth {found / 1e9:.1f} GB/s")
    return found

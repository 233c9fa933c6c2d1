"""What another process on one of our cores costs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import median

from engine.types import SamplingParams
from load_tests.engine_bench.bench import Bench
from load_tests.engine_bench.figures import Figures, MeasuredRow, ratio
from load_tests.engine_bench.subject import GREEDY
from load_tests.processes import end_with_parent

# Ends with its parent, whatever becomes of that.
_BUSY = """
import os
parent = os.getppid()
print("busy", flush=True)
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
_CONTEXT = 128
_SAMPLING = {"greedy": GREEDY, "top_p": replace(GREEDY, temperature=0.8, top_p=0.95)}
_COLUMNS = {
    "batch": "batch",
    "sampling": "sampling",
    "idle_tokens_per_s": "idle tokens/s",
    "busy_tokens_per_s": "one core busy tokens/s",
    "slower": "times slower",
}


def run(bench: Bench) -> list[Figures]:
    rows: list[MeasuredRow] = []
    for batch, sampling in ((1, "greedy"), (8, "greedy"), (8, "top_p")):
        idle: list[float] = []
        busy: list[float] = []
        for _ in range(bench.rounds):
            for rates, state in ((idle, nullcontext()), (busy, one_core_busy())):
                with state:
                    rates.append(_rate(bench, batch, _SAMPLING[sampling]))
        row: MeasuredRow = {
            "batch": batch,
            "sampling": sampling,
            "idle_tokens_per_s": median(idle),
            "busy_tokens_per_s": median(busy),
            "slower": ratio(median(idle), median(busy)),
        }
        bench.say(
            f"contention, batch {batch}, {sampling}: {median(idle):.1f} tokens/s, with one core busy {median(busy):.1f}"
        )
        rows.append(row)
    return [
        Figures(
            "contention",
            f"Decoding at context {_CONTEXT} while a process of its own spins on one core",
            _COLUMNS,
            rows,
            ("wanted: at most 2.5 times slower",),
        )
    ]


@contextmanager
def one_core_busy() -> Iterator[None]:
    """The last of the cores that this process may use is kept busy by a child."""
    child = subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE, preexec_fn=end_with_parent)
    try:
        os.sched_setaffinity(child.pid, {max(os.sched_getaffinity(0))})
        assert child.stdout is not None
        child.stdout.readline()
        yield
    finally:
        child.kill()
        child.communicate()


def _rate(bench: Bench, batch: int, params: SamplingParams) -> float:
    """Tokens per second over a fixed number of steps."""
    steps = 12 if bench.quick else 64
    with bench.subject.decoding(batch, _CONTEXT, params) as (engine, _):
        for _ in range(3):
            engine.step()
        start = time.perf_counter()
        produced = sum(len(delta.token_ids) for _ in range(steps) for delta in engine.step())
        return produced / (time.perf_counter() - start)

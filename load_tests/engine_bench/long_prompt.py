"""Streams beside a long prompt: how much slower their tokens come."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median

from engine.engine import Engine
from engine.types import FinishReason, GenerateRequest
from load_tests.engine_bench.bench import Bench
from load_tests.engine_bench.figures import Figures, MeasuredRow, ratio
from load_tests.engine_bench.requests import p95, request

_STREAMS = (1, 4, 8, 16)
_COLUMNS = {
    "streams": "streams",
    "slowdown": "max_decode_slowdown",
    "before_ms": "ITL p95 idle before ms",
    "after_ms": "after ms",
    "median_ms": "ITL p50 beside the prompt ms",
    "beside_ms": "ITL p95 beside ms",
    "times": "times",
    "longest_ms": "longest ms",
    "ttft_s": "TTFT of the prompt s",
    "alone_s": "TTFT alone s",
}


def run(bench: Bench) -> Figures:
    length = min(6000, bench.subject.capacity.max_model_len - 64)
    paced, unbound = bench.subject.config.max_decode_slowdown, float("inf")
    rows: list[MeasuredRow] = []
    with bench.subject.engine() as engine:
        alone_s = _first_token(engine, _prompt(engine, "alone", length))
    cases = ((1, paced),) if bench.quick else ((1, unbound), *((streams, paced) for streams in _STREAMS))
    for streams, slowdown in cases:
        row = _beside(bench, streams, length, slowdown, alone_s)
        bench.say(f"{streams} streams beside {length} tokens, slowdown {slowdown}: {row}")
        rows.append(row)
    title = f"Streams while a prompt of {length} tokens is prefilled"
    notes = (
        "wanted: p95 at most 3 times as long as idle",
        "idle: before and after together, as the streams' own contexts grow by hundreds of tokens in between",
    )
    return Figures("long_prompt", title, _COLUMNS, rows, notes)


def _beside(bench: Bench, streams: int, length: int, slowdown: float, alone_s: float) -> MeasuredRow:
    steps = 10 if bench.quick else 60
    with bench.subject.engine(max_decode_slowdown=slowdown) as engine:
        _first_token(engine, _prompt(engine, "first", length // 6))  # the scheduler learns what prompts take
        for i in range(streams):
            engine.add(_prompt(engine, f"stream {i}", 64, engine.capacity.max_model_len - 64))
        gaps = _Gaps(engine)
        gaps.until(lambda: len(gaps.last) == streams)
        before = gaps.of(steps)
        engine.add(_prompt(engine, "long", length))
        start = time.perf_counter()
        gaps.until(lambda: "long" in gaps.last)
        ttft = time.perf_counter() - start
        found = gaps.take()
        after = gaps.of(steps)
        engine.abort_all(FinishReason.ABORT)
    beside, idle = p95(found), p95(before + after)
    return {
        "streams": streams,
        "slowdown": slowdown,
        "before_ms": p95(before) * 1e3,
        "after_ms": p95(after) * 1e3,
        "median_ms": median(found or [0.0]) * 1e3,
        "beside_ms": beside * 1e3,
        "times": ratio(beside, idle),
        "longest_ms": max(found, default=0.0) * 1e3,
        "ttft_s": ttft,
        "alone_s": alone_s,
    }


class _Gaps:
    """Seconds between the tokens of each stream."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.last: dict[str, float] = {}
        self.found: list[float] = []

    def step(self) -> None:
        deltas = self.engine.step()
        now = time.perf_counter()
        for delta in deltas:
            if (before := self.last.get(delta.request_id)) is not None:
                self.found.append(now - before)
            self.last[delta.request_id] = now

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.step()

    def of(self, steps: int) -> list[float]:
        self.found.clear()
        for _ in range(steps):
            self.step()
        return self.take()

    def take(self) -> list[float]:
        found, self.found = self.found, []
        return found


def _prompt(engine: Engine, name: str, length: int, output: int = 1) -> GenerateRequest:
    return request(name, length, output, random.Random(name), engine.capacity.vocab_size)


def _first_token(engine: Engine, only: GenerateRequest) -> float:
    start = time.perf_counter()
    engine.add(only)
    while not any(delta.token_ids for delta in engine.step()):
        pass
    return time.perf_counter() - start

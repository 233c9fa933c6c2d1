"""Streams beside a long prompt: how much slower their tokens come."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median

from engine.engine import Engine
from engine.types import FinishReason, GenerateRequest
from load_tests.engine_bench.base import Row, Table, ratio
from load_tests.engine_bench.bench import Bench
from load_tests.engine_bench.requests import p95, request

_COLUMNS = {
    "streams": "streams",
    "slowdown": "max_decode_slowdown",
    "idle_ms": "ITL p95 idle ms",
    "median_ms": "ITL p50 beside the prompt ms",
    "beside_ms": "ITL p95 beside ms",
    "times": "times",
    "longest_ms": "longest ms",
    "ttft_s": "TTFT of the prompt s",
    "alone_s": "TTFT alone s",
}


def run(bench: Bench) -> Table:
    length = min(6000, bench.subject.capacity.max_model_len - 64)
    paced, unbound = bench.subject.config.max_decode_slowdown, float("inf")
    rows: list[Row] = []
    for streams, slowdown in ((1, paced),) if bench.quick else ((1, unbound), (1, paced), (8, paced)):
        row = _beside(bench, streams, length, slowdown)
        bench.say(f"{streams} streams beside {length} tokens, slowdown {slowdown}: {row}")
        rows.append(row)
    title = f"Streams while a prompt of {length} tokens is prefilled"
    return Table("long_prompt", title, _COLUMNS, rows, ("wanted: p95 at most 3 times as long as idle",))


def _beside(bench: Bench, streams: int, length: int, slowdown: float) -> Row:
    rng = random.Random(0)
    with bench.subject.engine(max_decode_slowdown=slowdown) as engine:
        vocab, most = engine.capacity.vocab_size, engine.capacity.max_model_len - 64
        alone_s = _first_token(engine, request("alone", length, 1, rng, vocab))
        for i in range(streams):
            engine.add(request(f"stream {i}", 64, most, rng, vocab))
        gaps = _Gaps(engine)
        gaps.until(lambda: len(gaps.last) == streams)
        gaps.found.clear()
        for _ in range(10 if bench.quick else 60):
            gaps.step()
        idle = p95(gaps.found)
        gaps.found.clear()
        engine.add(request("long", length, 1, rng, vocab))
        start = time.perf_counter()
        gaps.until(lambda: "long" in gaps.last)
        ttft = time.perf_counter() - start
        engine.abort_all(FinishReason.ABORT)
    beside = p95(gaps.found)
    return {
        "streams": streams,
        "slowdown": slowdown,
        "idle_ms": idle * 1e3,
        "median_ms": median(gaps.found or [0.0]) * 1e3,
        "beside_ms": beside * 1e3,
        "times": ratio(beside, idle),
        "longest_ms": max(gaps.found, default=0.0) * 1e3,
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


def _first_token(engine: Engine, only: GenerateRequest) -> float:
    start = time.perf_counter()
    engine.add(only)
    while not any(delta.token_ids for delta in engine.step()):
        pass
    return time.perf_counter() - start

"""What the scheduler's choices are worth on the real model: who waits, how long, and what it costs the others."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import NamedTuple

from engine.engine import Engine
from engine.types import FinishReason, GenerateRequest, SamplingParams
from load_tests.engine_bench.base import Row, Table, ratio
from load_tests.engine_bench.bench import Bench

_STREAM = "s"
_HIGH, _LOW = "high", "low"


def run(bench: Bench) -> list[Table]:
    return [_beside_a_long_prompt(bench), _restoring(bench), _overload(bench)]


def _request(name: str, prompt: int, output: int, rng: random.Random, vocab: int, priority: int = 0) -> GenerateRequest:
    ids = tuple(rng.randrange(vocab) for _ in range(prompt))
    return GenerateRequest(name, ids, SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True), priority)


# ------------------------------------------------------------------------------------------ long prompts, streams


def _beside_a_long_prompt(bench: Bench) -> Table:
    """Streams decode; then a long prompt comes."""
    length = min(6000, bench.subject.capacity.max_model_len - 64)
    rows: list[Row] = []
    for streams in (1,) if bench.quick else (1, 8):
        for slowdown in (bench.subject.config.max_decode_slowdown, float("inf")):
            row = _long_prompt(bench, streams, length, slowdown)
            bench.say(f"{streams} streams beside {length} tokens, slowdown {slowdown}: {row}")
            rows.append(row)
    columns = {
        "streams": "streams",
        "slowdown": "max_decode_slowdown",
        "idle_ms": "ITL p95 idle ms",
        "beside_ms": "ITL p95 beside the prompt ms",
        "times": "times",
        "ttft_s": "TTFT of the prompt s",
        "alone_s": "TTFT alone s",
    }
    return Table("long_prompt", f"Streams while a prompt of {length} tokens is prefilled", columns, rows)


def _long_prompt(bench: Bench, streams: int, length: int, slowdown: float) -> Row:
    rng = random.Random(0)
    with bench.subject.engine(max_decode_slowdown=slowdown) as engine:
        vocab, most = engine.capacity.vocab_size, engine.capacity.max_model_len - 64
        alone_s = _first_token(engine, _request("alone", length, 1, rng, vocab))
        for i in range(streams):
            engine.add(_request(f"{_STREAM}{i}", 64, most, rng, vocab))
        gaps = _Gaps(engine)
        gaps.until(lambda: len(gaps.last) == streams)
        gaps.found.clear()
        for _ in range(10 if bench.quick else 60):
            gaps.step()
        idle = _p95(gaps.found)
        gaps.found.clear()
        engine.add(_request("long", length, 1, rng, vocab))
        start = time.perf_counter()
        gaps.until(lambda: "long" in gaps.last)
        ttft = time.perf_counter() - start
        engine.abort_all(FinishReason.ABORT)
    beside = _p95(gaps.found)
    return {
        "streams": streams,
        "slowdown": slowdown,
        "idle_ms": idle * 1e3,
        "beside_ms": beside * 1e3,
        "times": ratio(beside, idle),
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


def _first_token(engine: Engine, request: GenerateRequest) -> float:
    start = time.perf_counter()
    engine.add(request)
    while not any(delta.request_id == request.request_id and delta.token_ids for delta in engine.step()):
        pass
    return time.perf_counter() - start


# ---------------------------------------------------------------------------------------------------- preemption


def _restoring(bench: Bench) -> Table:
    """One seat; a sequence with a long context gives it up to a short request and takes it back."""
    context = min(4096, bench.subject.capacity.max_model_len - 64)
    rows: list[Row] = []
    for mode in ("recompute", "swap", "auto"):
        row: dict[str, float | str | None] = {"mode": mode, **_restore(bench, mode, context)}
        bench.say(f"preempted with {context} tokens, {mode}: {row}")
        rows.append(row)
    columns = {
        "mode": "preemption_mode",
        "pause_s": "pause s",
        "other_s": "of it the other request s",
        "swaps": "swaps",
    }
    return Table("restore", f"A sequence of {context} tokens preempted by a short one, one seat", columns, rows)


def _restore(bench: Bench, mode: str, context: int) -> dict[str, float | str | None]:
    rng = random.Random(1)
    with bench.subject.engine(scheduling_policy="priority", preemption_mode=mode, max_num_seqs=1) as engine:
        vocab = engine.capacity.vocab_size
        engine.add(_request("victim", context, 32, rng, vocab, priority=1))
        seen: list[str] = []
        while seen.count("victim") < 2:
            seen += [delta.request_id for delta in engine.step()]
        start = time.perf_counter()
        engine.add(_request("other", 16, 4, rng, vocab))
        ended = 0.0
        while True:
            deltas = {delta.request_id: delta for delta in engine.step()}
            now = time.perf_counter()
            if "other" in deltas and deltas["other"].finish_reason:
                ended = now
            if ended and "victim" in deltas:
                break
        swaps = engine.stats().num_swaps
        engine.abort_all(FinishReason.ABORT)
    return {"pause_s": now - start, "other_s": ended - start, "swaps": swaps}


# ------------------------------------------------------------------------------------------------------ overload


class _Load(NamedTuple):
    """One tier's arrivals."""

    name: str
    rate: float
    prompt: int
    output: int
    priority: int


class _Outcome(NamedTuple):
    ttfts: dict[str, list[float]]
    tokens_per_s: float


_SEATS = 16
_SHARE_OF_HIGH = 0.1


def _overload(bench: Bench) -> Table:
    """Twice what the engine can serve, a tenth of it important. Waiting requests count with what they have waited."""
    seconds, settle_s = (0.5, 0.1) if bench.quick else (16.0, 4.0)
    sizes = (64, 16) if bench.quick else (256, 64)
    capacity = _capacity(bench, *sizes)
    high = _Load(_HIGH, 2 * capacity * _SHARE_OF_HIGH, *sizes, priority=0)
    low = _Load(_LOW, 2 * capacity * (1 - _SHARE_OF_HIGH), *sizes, priority=1)
    bench.say(f"overload: {capacity:.1f} requests/s can be served")
    unloaded = _serve(bench, (high,), "priority", seconds, settle_s)
    base = _p95(unloaded.ttfts[_HIGH])
    rows: list[Row] = [_overload_row("priority, high alone", unloaded, base, None)]
    fcfs = _serve(bench, (high, low), "fcfs", seconds, settle_s)
    for policy, outcome in (("fcfs", fcfs), ("priority", _serve(bench, (high, low), "priority", seconds, settle_s))):
        rows.append(_overload_row(policy, outcome, base, fcfs.tokens_per_s))
        bench.say(f"overload, {policy}: {rows[-1]}")
    columns = {
        "policy": "scheduling_policy",
        "high_p95_s": "high tier TTFT p95 s",
        "times": "times alone",
        "low_p50_s": "low tier TTFT p50 s",
        "tokens_per_s": "tokens/s",
        "over_fcfs": "of fcfs",
    }
    note = f"{2 * capacity:.1f} requests/s of {sizes[0]} tokens in and {sizes[1]} out, {_SEATS} seats"
    return Table("overload", "Two tiers at twice the capacity", columns, rows, (note,))


def _overload_row(policy: str, outcome: _Outcome, base: float, fcfs: float | None) -> Row:
    high, low = outcome.ttfts[_HIGH], outcome.ttfts.get(_LOW) or [0.0]
    return {
        "policy": policy,
        "high_p95_s": _p95(high),
        "times": ratio(_p95(high), base),
        "low_p50_s": sorted(low)[len(low) // 2],
        "tokens_per_s": outcome.tokens_per_s,
        "over_fcfs": ratio(outcome.tokens_per_s, fcfs) or 1.0,
    }


def _capacity(bench: Bench, prompt: int, output: int) -> float:
    """Requests per second with every seat taken."""
    count, rng = (4 if bench.quick else 2 * _SEATS), random.Random(2)
    with bench.subject.engine(max_num_seqs=_SEATS) as engine:
        for i in range(count):
            engine.add(_request(str(i), prompt, output, rng, engine.capacity.vocab_size))
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
    return count / (time.perf_counter() - start)


def _serve(bench: Bench, loads: tuple[_Load, ...], policy: str, seconds: float, settle_s: float) -> _Outcome:
    """In real time; the first `settle_s` do not count."""
    arrivals = sorted((at, load.name, load) for load in loads for at in _times(load, seconds))
    rng, ttfts = random.Random(3), {load.name: list[float]() for load in loads}
    pending: dict[str, tuple[float, str]] = {}
    tokens, number = 0, 0
    with bench.subject.engine(scheduling_policy=policy, max_num_seqs=_SEATS) as engine:
        start = time.perf_counter()
        while (now := time.perf_counter() - start) < seconds:
            while number < len(arrivals) and arrivals[number][0] <= now:
                at, name, load = arrivals[number]
                vocab = engine.capacity.vocab_size
                engine.add(_request(str(number), load.prompt, load.output, rng, vocab, load.priority))
                pending[str(number)] = at, name
                number += 1
            deltas = engine.step()
            if not deltas and not engine.has_work:
                time.sleep(0.001)
            now = time.perf_counter() - start
            for delta in deltas:
                tokens += len(delta.token_ids) if now > settle_s else 0
                if delta.token_ids and (first := pending.pop(delta.request_id, None)):
                    tokens += delta.num_prompt_tokens if now > settle_s else 0
                    if first[0] > settle_s or len(loads) == 1:
                        ttfts[first[1]].append(now - first[0])
        for at, name in pending.values():
            if settle_s < at:
                ttfts[name].append(seconds - at)
        engine.abort_all(FinishReason.ABORT)
    return _Outcome(ttfts, tokens / (seconds - settle_s))


def _times(load: _Load, seconds: float) -> list[float]:
    """Poisson; one at least, so that there is something to measure."""
    rng, at, times = random.Random(load.name), 0.0, list[float]()
    while (at := at + rng.expovariate(load.rate)) < seconds:
        times.append(at)
    return times or [seconds / 2]


def _p95(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] if ordered else 0.0

"""Two tiers at twice what the engine can serve: who waits, how long, and what it costs the others."""

from __future__ import annotations

import random
import time
from typing import NamedTuple

from engine.types import FinishReason
from load_tests.engine_bench.bench import Bench
from load_tests.engine_bench.figures import Figures, MeasuredRow, ratio
from load_tests.engine_bench.requests import p95, request

_HIGH, _LOW = "high", "low"
_SEATS = 16
_SHARE_OF_HIGH = 0.1
_COLUMNS = {
    "policy": "scheduling_policy",
    "high": "of the high tier",
    "high_p95_s": "its TTFT p95 s",
    "times": "times alone",
    "low_p50_s": "low tier TTFT p50 s",
    "tokens_per_s": "tokens/s",
    "over_fcfs": "of fcfs",
    "preemptions": "preemptions",
}


class _Load(NamedTuple):
    """One tier's arrivals."""

    name: str
    rate: float
    prompt: int
    output: int
    priority: int


class _TierTimes(NamedTuple):
    ttfts: dict[str, list[float]]
    tokens_per_s: float
    preemptions: int


def run(bench: Bench) -> Figures:
    """A tenth of the arrivals are important. Waiting requests count with what they have waited."""
    seconds, settle_s = (0.5, 0.1) if bench.quick else (75.0, 5.0)
    sizes = (64, 16) if bench.quick else (128, 32)
    capacity = _capacity(bench, *sizes)
    high = _Load(_HIGH, 2 * capacity * _SHARE_OF_HIGH, *sizes, priority=0)
    low = _Load(_LOW, 2 * capacity * (1 - _SHARE_OF_HIGH), *sizes, priority=1)
    bench.say(f"overload: {capacity:.1f} requests/s can be served")
    unloaded = _serve(bench, (high,), "priority", seconds, settle_s)
    base = p95(unloaded.ttfts[_HIGH])
    rows: list[MeasuredRow] = [_row("priority, high alone", unloaded, base, None)]
    fcfs = _serve(bench, (high, low), "fcfs", seconds, settle_s)
    for policy, outcome in (("fcfs", fcfs), ("priority", _serve(bench, (high, low), "priority", seconds, settle_s))):
        rows.append(_row(policy, outcome, base, fcfs.tokens_per_s))
        bench.say(f"overload, {policy}: {rows[-1]}")
    notes = (
        f"{2 * capacity:.1f} requests/s of {sizes[0]} tokens in and {sizes[1]} out, {_SEATS} seats, {seconds:.0f} s",
        "wanted: the high tier's TTFT p95 at most 1.5 times that alone, tokens/s at least 0.9 of fcfs",
    )
    return Figures("overload", "Two tiers at twice the capacity", _COLUMNS, rows, notes)


def _row(policy: str, outcome: _TierTimes, base: float, fcfs: float | None) -> MeasuredRow:
    high, low = outcome.ttfts[_HIGH], outcome.ttfts.get(_LOW) or [0.0]
    return {
        "policy": policy,
        "high": str(len(high)),
        "high_p95_s": p95(high),
        "times": ratio(p95(high), base),
        "low_p50_s": sorted(low)[len(low) // 2],
        "tokens_per_s": outcome.tokens_per_s,
        "over_fcfs": ratio(outcome.tokens_per_s, fcfs) or 1.0,
        "preemptions": str(outcome.preemptions),
    }


def _capacity(bench: Bench, prompt: int, output: int) -> float:
    """Requests per second with every seat taken."""
    count, rng = (4 if bench.quick else 4 * _SEATS), random.Random(2)
    with bench.subject.engine(max_num_seqs=_SEATS) as engine:
        for i in range(count):
            engine.add(request(str(i), prompt, output, rng, engine.capacity.vocab_size))
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
    return count / (time.perf_counter() - start)


def _serve(bench: Bench, loads: tuple[_Load, ...], policy: str, seconds: float, settle_s: float) -> _TierTimes:
    """In real time, but without the time in which nothing is there to do; the first `settle_s` do not count."""
    arrivals = sorted((at, load.name, load) for load in loads for at in _times(load, seconds))
    rng, ttfts = random.Random(3), {load.name: list[float]() for load in loads}
    pending: dict[str, tuple[float, str]] = {}
    tokens, number, skipped = 0, 0, 0.0
    with bench.subject.engine(scheduling_policy=policy, max_num_seqs=_SEATS) as engine:
        start = time.perf_counter()
        while (now := time.perf_counter() - start + skipped) < seconds:
            while number < len(arrivals) and arrivals[number][0] <= now:
                at, name, load = arrivals[number]
                vocab = engine.capacity.vocab_size
                engine.add(request(str(number), load.prompt, load.output, rng, vocab, load.priority))
                pending[str(number)] = at, name
                number += 1
            deltas = engine.step()
            if not deltas and not engine.has_work:
                skipped += (arrivals[number][0] if number < len(arrivals) else seconds) - now
            now = time.perf_counter() - start + skipped
            for delta in deltas:
                tokens += len(delta.token_ids) if now > settle_s else 0
                if delta.token_ids and (first := pending.pop(delta.request_id, None)):
                    tokens += delta.num_prompt_tokens if now > settle_s else 0
                    if first[0] > settle_s:
                        ttfts[first[1]].append(now - first[0])
        for at, name in pending.values():
            if settle_s < at:
                ttfts[name].append(seconds - at)
        preemptions = engine.stats().num_preemptions
        engine.abort_all(FinishReason.ABORT)
    return _TierTimes(ttfts, tokens / (seconds - settle_s), preemptions)


def _times(load: _Load, seconds: float) -> list[float]:
    """Poisson; one at least, so that there is something to measure."""
    rng, at, times = random.Random(load.name), 0.0, list[float]()
    while (at := at + rng.expovariate(load.rate)) < seconds:
        times.append(at)
    return times or [seconds / 2]

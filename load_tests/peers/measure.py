"""One workload on one running server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from load_tests.peers.base import PeerError
from load_tests.peers.workloads import PeerWorkload
from load_tests.progress import ProgressLine
from load_tests.report.result import measured
from load_tests.runner import Target, run
from load_tests.stats import Summary, summarize


@dataclass(frozen=True, slots=True)
class Measurement:
    """Latencies are medians over the requests (`ttft_ms`, `tpot_ms`) and over the gaps between arrivals (`itl_ms`).
    `tpot_ms`: a request's time per token after its first; unlike `itl_ms` it does not depend on how many tokens come
    in one event. `errors`: kind -> count."""

    output_tokens_per_s: float
    ttft_ms: float
    itl_ms: float
    tpot_ms: float
    requests: int
    prompt_tokens: float  # mean of a request
    duration_s: float
    errors: dict[str, int]


def measure(workload: PeerWorkload, round_number: int, url: str, model: str, keep_alive: bool) -> Measurement:
    """Raises LoadError when not one request succeeds."""
    line = ProgressLine()
    try:
        done = asyncio.run(run(workload.scenario(round_number), Target(url, model, keep_alive=keep_alive), line))
    finally:
        line.clear()
    summary = summarize(measured(done))
    if not summary.succeeded:
        raise PeerError(f"every request failed: {summary.errors}")
    return of_summary(summary)


def of_summary(summary: Summary) -> Measurement:
    def p50(name: str) -> float:
        return summary.latency_ms.get(name, {}).get("p50", float("nan"))

    return Measurement(
        output_tokens_per_s=summary.output_tokens_per_s,
        ttft_ms=p50("ttft"),
        itl_ms=p50("itl"),
        tpot_ms=p50("tpot"),
        requests=summary.requests,
        prompt_tokens=round(summary.prompt_tokens / max(1, summary.succeeded), 1),
        duration_s=summary.duration_s,
        errors=summary.errors,
    )

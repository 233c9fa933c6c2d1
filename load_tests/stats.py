"""From outcomes to numbers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from load_tests.outcome import RequestOutcome
from load_tests.scenario import Slo

PERCENTILES = (50, 90, 95, 99)

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that kept the SLO; a failed one did not. `share`: of all requests."""

    requests: int
    share: float
    requests_per_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """`latency_ms`: metric -> {mean, p50, p90, p95, p99, max}. ttft: due -> first text; itl: gap between two
    arrivals of text (a server may put several tokens into one); tpot: (last - first text) / (tokens - 1) of each
    request; e2e: due -> end. `duration_s`: first request due -> last ended. `send_lag_ms`: how late the generator
    itself was; it is part of the latencies. `cached_tokens`: of the prompts', as far as the server reports them."""

    requests: int
    succeeded: int
    errors: dict[str, int]
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput: Goodput | None
    latency_ms: dict[str, dict[str, float]]
    send_lag_ms: dict[str, float]


def summarize(outcomes: Sequence[RequestOutcome], slo: Slo | None = None) -> Summary:
    good = [o for o in outcomes if o.error is None]
    duration = max((o.end for o in outcomes), default=0.0) - min((o.due for o in outcomes), default=0.0)
    num_prompt = sum(o.prompt_tokens or 0 for o in good)
    num_output = sum(o.tokens for o in good)
    per_s = 1 / duration if duration > 0 else 0.0
    samples = {"ttft": ttfts(good), "itl": gaps(good), "tpot": tpots(good), "e2e": _array(o.e2e_s for o in good)}
    kept = [o for o in good if keeps(o, slo)] if slo is not None else []
    goodput = Goodput(
        requests=len(kept),
        share=round(len(kept) / max(1, len(outcomes)), 4),
        requests_per_s=round(len(kept) * per_s, 3),
        output_tokens_per_s=round(sum(o.tokens for o in kept) * per_s, 2),
    )
    return Summary(
        requests=len(outcomes),
        succeeded=len(good),
        errors=dict(Counter(o.error for o in outcomes if o.error is not None)),
        duration_s=round(duration, 4),
        prompt_tokens=num_prompt,
        cached_tokens=sum(o.cached_tokens or 0 for o in good),
        output_tokens=num_output,
        requests_per_s=round(len(good) * per_s, 3),
        output_tokens_per_s=round(num_output * per_s, 2),
        total_tokens_per_s=round((num_prompt + num_output) * per_s, 2),
        goodput=goodput if slo is not None else None,
        latency_ms={name: spread_ms(values) for name, values in samples.items() if len(values)},
        send_lag_ms=spread_ms(_array(o.sent - o.due for o in outcomes)) if outcomes else {},
    )


def keeps(outcome: RequestOutcome, slo: Slo) -> bool:
    """The limit on ITL holds for a request's mean, so that servers which send several tokens at once are judged like
    those that send each alone."""
    if outcome.error is not None:
        return False
    if slo.ttft_ms is not None and outcome.ttft_s * 1000 > slo.ttft_ms:
        return False
    tpot = outcome.tpot_s
    return slo.itl_ms is None or tpot is None or tpot * 1000 <= slo.itl_ms


def ttfts(good: Iterable[RequestOutcome]) -> Seconds:
    return _array(o.ttft_s for o in good)


def tpots(good: Iterable[RequestOutcome]) -> Seconds:
    return _array(tpot for o in good if (tpot := o.tpot_s) is not None)


def gaps(good: Iterable[RequestOutcome]) -> Seconds:
    pieces = [np.diff(np.frombuffer(o.events)) for o in good if len(o.events) > 1]
    return np.concatenate(pieces) if pieces else np.empty(0)


def spread_ms(seconds: Seconds) -> dict[str, float]:
    """mean, percentiles (linear between the nearest ranks) and max of a non-empty array."""
    ms = seconds * 1000
    marks = dict(zip((f"p{p}" for p in PERCENTILES), np.percentile(ms, PERCENTILES), strict=True))
    row = {"mean": ms.mean(), **marks, "max": ms.max()}
    return {name: round(float(value), 3) for name, value in row.items()}


def _array(values: Iterable[float]) -> Seconds:
    return np.fromiter(values, dtype=np.float64)

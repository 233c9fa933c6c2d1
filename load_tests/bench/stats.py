"""From outcomes to numbers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from load_tests.bench.client import Outcome

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Summary:
    """`latency_ms`: metric -> {mean, p50, p90, p95, p99, max}. ttft: due -> first text; itl: gap between two
    arrivals of text (a server may put several tokens into one); tpot: (last - first text) / (tokens - 1) of each
    request; e2e: due -> end. `duration_s`: first request due -> last ended."""

    requests: int
    succeeded: int
    errors: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    latency_ms: dict[str, dict[str, float]]


def percentile(ordered: Sequence[float], p: float) -> float:
    """Linear interpolation between the two nearest ranks of an ascending, non-empty sequence."""
    at = (len(ordered) - 1) * p / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    good = [o for o in outcomes if o.error is None]
    duration = max((o.end for o in outcomes), default=0.0) - min((o.due for o in outcomes), default=0.0)
    # A server that reports no usage is taken to have sent one token per event.
    output = {id(o): len(o.events) if o.output_tokens is None else o.output_tokens for o in good}
    num_prompt = sum(o.prompt_tokens or 0 for o in good)
    num_output = sum(output.values())
    per_s = 1 / duration if duration > 0 else 0.0
    tpot = [(o.events[-1] - o.events[0]) / (output[id(o)] - 1) for o in good if output[id(o)] > 1]
    samples = {
        "ttft": [o.ttft_s for o in good],
        "itl": [b - a for o in good for a, b in pairwise(o.events)],
        "tpot": tpot,
        "e2e": [o.e2e_s for o in good],
    }
    return Summary(
        requests=len(outcomes),
        succeeded=len(good),
        errors=dict(Counter(o.error for o in outcomes if o.error is not None)),
        duration_s=round(duration, 4),
        prompt_tokens=num_prompt,
        output_tokens=num_output,
        requests_per_s=round(len(good) * per_s, 3),
        output_tokens_per_s=round(num_output * per_s, 2),
        total_tokens_per_s=round((num_prompt + num_output) * per_s, 2),
        latency_ms={name: _spread(values) for name, values in samples.items() if values},
    )


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    ms = sorted(s * 1000 for s in seconds)
    row = {"mean": sum(ms) / len(ms), **{f"p{p}": percentile(ms, p) for p in PERCENTILES}, "max": ms[-1]}
    return {name: round(value, 3) for name, value in row.items()}


def table(summary: Summary) -> str:
    """For people."""
    s = summary
    lines = [
        f"requests      {s.succeeded} ok, {s.requests - s.succeeded} failed, in {s.duration_s:.2f} s "
        f"({s.requests_per_s:.2f} per s)",
        f"tokens        {s.prompt_tokens} in, {s.output_tokens} out",
        f"throughput    {s.output_tokens_per_s:.1f} output tokens/s, {s.total_tokens_per_s:.1f} in all",
    ]
    lines += [f"error         {count} x {kind}" for kind, count in sorted(s.errors.items())]
    columns = ["mean", *(f"p{p}" for p in PERCENTILES), "max"]
    lines += ["", "ms    " + "".join(f"{name:>11}" for name in columns)]
    lines += [f"{name:<6}" + "".join(f"{row[c]:>11.1f}" for c in columns) for name, row in s.latency_ms.items()]
    return "\n".join(lines)

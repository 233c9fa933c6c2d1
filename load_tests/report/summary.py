"""What a run or a phase came to, as text for a terminal."""

from __future__ import annotations

from autoscaling.report.tables import text_table
from load_tests.stats import PERCENTILES, Summary

LATENCY_HEADS = ("ms", "mean", *(f"p{p}" for p in PERCENTILES), "max")
_LATE_MS = 20.0


def summary_text(summary: Summary) -> str:
    s = summary
    cached = f" ({s.cached_tokens / s.prompt_tokens:.0%} cached)" if s.cached_tokens and s.prompt_tokens else ""
    lines = [
        f"requests      {s.succeeded} ok, {s.requests - s.succeeded} failed, in {s.duration_s:.2f} s "
        f"({s.requests_per_s:.2f} per s)",
        f"tokens        {s.prompt_tokens} in{cached}, {s.output_tokens} out",
        f"throughput    {s.output_tokens_per_s:.1f} output tokens/s, {s.total_tokens_per_s:.1f} in all",
    ]
    if s.goodput is not None:
        g = s.goodput
        lines.append(
            f"goodput       {g.share:.1%} within the SLO: {g.requests_per_s:.2f} requests/s, "
            f"{g.output_tokens_per_s:.1f} output tokens/s"
        )
    lines += [f"error         {count} x {kind}" for kind, count in sorted(s.errors.items())]
    if s.send_lag_ms and s.send_lag_ms["p99"] > _LATE_MS:
        lines.append(
            f"warning       requests left late, p99 {s.send_lag_ms['p99']:.0f} ms: this machine is too busy to "
            "generate the load, and the latencies include that"
        )
    return "\n".join([*lines, "", text_table(LATENCY_HEADS, latency_rows(s))])


def latency_rows(summary: Summary) -> list[list[str]]:
    """One text for each of LATENCY_HEADS."""
    return [[name, *(f"{row[head]:,.1f}" for head in LATENCY_HEADS[1:])] for name, row in summary.latency_ms.items()]

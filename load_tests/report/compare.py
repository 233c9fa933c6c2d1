"""Two results side by side, as ratios."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoscaling.report.tables import text_table
from load_tests.errors import LoadError

_RATES = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
_PERCENTILES = ("p50", "p90", "p99")


def read(path: Path) -> dict[str, Any]:
    """A result.json, or the directory it lies in. Raises LoadError."""
    file = path / "result.json" if path.is_dir() else path
    data: dict[str, Any]
    try:
        data = json.loads(file.read_text())
        if not {"scenario", "total", "phases"} <= data.keys():
            raise ValueError
    except OSError as error:
        raise LoadError(f"{file}: {error.strerror}") from None
    except (ValueError, AttributeError):
        raise LoadError(f"{file}: not the result of a load test") from None
    return data


def compare(a: dict[str, Any], b: dict[str, Any]) -> str:
    """b / a: of rates more than 1 is better, of times less."""
    lines = [f"a: {_who(a)}", f"b: {_who(b)}"]
    if a["scenario"] != b["scenario"]:
        lines.append("note: the scenarios differ")
    parts = [("total", a["total"], b["total"])]
    shared = [name for name in a["phases"] if name in b["phases"]]
    if len(shared) > 1:
        parts += [(name, a["phases"][name], b["phases"][name]) for name in shared]
    for name, left, right in parts:
        rows = [(what, f"{x:,.2f}", f"{y:,.2f}", _ratio(x, y)) for what, x, y in _rows(left, right)]
        lines += ["", text_table((name, "a", "b", "b / a"), rows)]
    return "\n".join(lines)


def _rows(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    yield "failed requests", a["requests"] - a["succeeded"], b["requests"] - b["succeeded"]
    for rate in _RATES:
        yield rate.replace("_per_s", "/s").replace("_", " "), a[rate], b[rate]
    if a["goodput"] and b["goodput"]:
        yield "share in the SLO", a["goodput"]["share"], b["goodput"]["share"]
        yield "good requests/s", a["goodput"]["requests_per_s"], b["goodput"]["requests_per_s"]
    for metric in ("ttft", "itl", "tpot", "e2e"):
        if metric in a["latency_ms"] and metric in b["latency_ms"]:
            for p in _PERCENTILES:
                yield f"{metric} {p} ms", a["latency_ms"][metric][p], b["latency_ms"][metric][p]


def _ratio(a: float, b: float) -> str:
    return f"{b / a:.2f}x" if a else "-"


def _who(result: dict[str, Any]) -> str:
    return f"{result['scenario']['name']}, {result['model']} at {result['base_url']}, {result['started_at']}"

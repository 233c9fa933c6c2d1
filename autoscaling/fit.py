"""A service model from measurements: what `engine_bench` wrote, or the gateway's request log. Least squares with no
negative coefficients, in relative errors, so that short steps count as much as long ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoscaling.service_model import ServiceModel
from autoscaling.settings import PolicyError

COEFFICIENTS = ("base_s", "prefill_token_s", "prefill_pair_s", "decode_seq_s", "decode_context_s")
_SMALLEST = 1e-12


@dataclass(frozen=True, slots=True)
class Step:
    """A measured time and what was in it: coefficients by name, e.g. base_s: number of steps."""

    seconds: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Fitted:
    """`error`: the median of the relative errors; `worst`: their 95th percentile. `num`: measurements."""

    model: ServiceModel
    error: float
    worst: float
    num: int


def fit_file(path: Path, base: ServiceModel) -> Fitted:
    """`base` gives what the file does not tell: limits, start-up, and coefficients nothing in it depends on. Raises
    PolicyError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PolicyError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PolicyError(f"{path}: not a text file") from None
    try:
        if '"tables"' in text[:100_000]:
            steps = list(bench_steps(json.loads(text)))
        else:
            steps = list(log_steps((json.loads(line) for line in text.splitlines() if line.strip()), base))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PolicyError(f"{path}: neither engine_bench's JSON nor a request log: {error!r}") from None
    return fit(steps, replace(base, about=f"fitted to {len(steps)} measurements in {path.name}"), str(path))


def bench_steps(report: Mapping[str, Any]) -> Iterable[Step]:
    """The tables `decode` (steps of the whole engine) and `prefill` (chunks, whose base is that of a step too)."""
    for row in report["tables"].get("decode", {}).get("rows", ()):
        if row.get("step_ms") is not None:
            batch, context = float(row["batch"]), float(row["context"])
            parts = {"base_s": 1.0, "decode_seq_s": batch, "decode_context_s": batch * context}
            yield Step(row["step_ms"] / 1e3, parts)
    for row in report["tables"].get("prefill", {}).get("rows", ()):
        if row.get("ms") is not None:
            chunk, context = float(row["chunk"]), float(row["context"])
            parts = {"base_s": 1.0, "prefill_token_s": chunk, "prefill_pair_s": chunk * (context + chunk / 2)}
            yield Step(row["ms"] / 1e3, parts)


def log_steps(rows: Iterable[Mapping[str, Any]], base: ServiceModel) -> Iterable[Step]:
    """Each finished request gives two: its prefill, and its decode steps.

    A request sees all the work done while it runs, so the batch of others is taken from the overlap of the
    records themselves: the mean number of requests in decode, and the prompt tokens computed meanwhile.
    """
    spans = [_Span.of(row) for row in rows if row.get("prefill_s") and row.get("decode_s")]
    if not spans:
        return
    ends = np.array([s.end_s for s in spans])
    decode = np.array([s.decode_s for s in spans])
    first = ends - decode
    prefill_from = first - np.array([s.prefill_s for s in spans])
    prompt = np.array([s.prompt for s in spans], float)
    output = np.array([s.output for s in spans], float)
    for i, span in enumerate(spans):
        if span.output > 2:
            mine = _overlaps(first, ends, first[i], ends[i])
            others = _overlaps(prefill_from, first, first[i], ends[i]) / np.maximum(first - prefill_from, 1e-9)
            batch = float((mine / span.decode_s).sum())
            context = float((mine / span.decode_s * (prompt + output / 2)).sum())
            steps = float(span.output - 1)
            yield Step(
                span.decode_s,
                {
                    "base_s": steps,
                    "decode_seq_s": steps * batch,
                    "decode_context_s": steps * context,
                    "prefill_token_s": float((others * prompt).sum()),
                },
            )
        span_s = max(span.prefill_s, 1e-9)
        busy = _overlaps(first, ends, prefill_from[i], first[i]) / span_s
        shared = _overlaps(prefill_from, first, prefill_from[i], first[i]) / np.maximum(first - prefill_from, 1e-9)
        tokens = float((shared * prompt).sum())
        steps = max(1.0, tokens / base.max_num_batched_tokens)
        yield Step(
            span.prefill_s,
            {
                "base_s": steps,
                "prefill_token_s": tokens,
                "decode_seq_s": steps * float(busy.sum()),
                "decode_context_s": steps * float((busy * (prompt + output / 2)).sum()),
            },
        )


@dataclass(frozen=True, slots=True)
class _Span:
    end_s: float
    prefill_s: float
    decode_s: float
    prompt: int
    output: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> _Span:
        computed = max(1, int(row["prompt_tokens"]) - int(row.get("cached_tokens", 0)))
        times = float(row["time"]), float(row["prefill_s"]), float(row["decode_s"])
        return cls(*times, computed, int(row["completion_tokens"]))


def _overlaps(start: NDArray[np.float64], end: NDArray[np.float64], from_s: float, to_s: float) -> NDArray[np.float64]:
    shared: NDArray[np.float64] = np.clip(np.minimum(end, to_s) - np.maximum(start, from_s), 0.0, None)
    return shared


def fit(steps: Sequence[Step], base: ServiceModel, where: str) -> Fitted:
    """Coefficients that no step depends on keep the value of `base`. Raises PolicyError."""
    from scipy.optimize import nnls  # type: ignore[import-untyped, unused-ignore]

    names = [n for n in COEFFICIENTS if any(step.parts.get(n) for step in steps)]
    if len(steps) < len(names) or "base_s" not in names:
        raise PolicyError(f"{where}: {len(steps)} usable measurements are too few to fit {len(names)} coefficients")
    seconds = np.array([step.seconds for step in steps])
    parts = np.array([[step.parts.get(n, 0.0) for n in names] for step in steps])
    kept = np.isfinite(parts).all(axis=1) & (seconds > 0)
    rows = parts[kept] / seconds[kept, None]
    scale = rows.max(axis=0)
    found, _ = nnls(rows / scale, np.ones(len(rows)))
    found = found / scale
    errors = np.abs(rows @ found - 1.0)
    values: dict[str, Any] = {
        name: float(f"{max(value, _SMALLEST):.4g}") for name, value in zip(names, found.tolist(), strict=True)
    }
    model = replace(base, **values)
    return Fitted(model, float(np.median(errors)), float(np.quantile(errors, 0.95)), len(rows))

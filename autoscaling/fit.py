"""A service model from measurements: what `engine_bench` wrote, or the gateway's request log. Least deviations with no
negative coefficients, in relative errors, so that short steps count as much as long ones, and those few of a log whose
batch its overlaps do not tell right do not pull at all the others."""

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
_ROUNDS = 6  # of least squares, each with less weight for what the last one did not fit
_GOOD = 0.02  # smaller errors weigh all the same


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


def fit_file(path: Path, base: ServiceModel, served: str | None = None) -> Fitted:
    """`base` gives what the file does not tell: limits, start-up, and coefficients nothing in it depends on. `served`:
    the model in a request log whose requests count, if there are several. Raises PolicyError."""
    steps = _read(path, base, served)
    return fit(steps, replace(base, about=f"fitted to {len(steps)} measurements in {path.name}"), str(path))


def fit_contention(path: Path, alone: ServiceModel, served: str | None = None) -> Fitted:
    """`alone`, fitted to a replica that had its host to itself, with the contention that explains what the file says of
    one beside another that was always busy. Raises PolicyError."""
    steps = [(step.seconds, _seconds(step, alone)) for step in _read(path, alone, served) if step.seconds > 0]
    if not steps:
        raise PolicyError(f"{path}: no usable measurements")
    measured, expected = np.array(steps).T
    slower = float(measured.sum() / expected.sum())
    errors = np.abs(expected * slower / measured - 1.0)
    model = replace(
        alone,
        contention=float(f"{max(0.0, slower - 1.0):.4g}"),
        replicas_per_host=max(2, alone.replicas_per_host),
        about=f"{alone.about}; contention by {len(steps)} in {path.name}",
    )
    return Fitted(model, float(np.median(errors)), float(np.quantile(errors, 0.95)), len(steps))


def _seconds(step: Step, model: ServiceModel) -> float:
    return float(sum(getattr(model, name) * amount for name, amount in step.parts.items()))


def _read(path: Path, base: ServiceModel, served: str | None) -> list[Step]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PolicyError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PolicyError(f"{path}: not a text file") from None
    try:
        if '"tables"' in text[:100_000]:
            return list(bench_steps(json.loads(text)))
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        return list(log_steps(_of_one(rows, served, path), base))
    except PolicyError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PolicyError(f"{path}: neither engine_bench's JSON nor a request log: {error!r}") from None


def _of_one(rows: Sequence[Mapping[str, Any]], served: str | None, path: Path) -> list[Mapping[str, Any]]:
    """Those of the model `served`; of the only one, if it is None."""
    names = sorted({str(row["model"]) for row in rows if row.get("model") is not None})
    if served is None and len(names) > 1:
        raise PolicyError(f"{path}: requests to several models: {', '.join(names)}; choose one with --model")
    if served is not None and served not in names:
        raise PolicyError(f"{path}: no requests to {served!r}; there are some to {', '.join(names) or 'none'}")
    return [row for row in rows if served is None or row.get("model") == served]


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
    records themselves: the mean number of requests in decode, and the prompt tokens computed meanwhile. They must be
    of one replica.
    """
    spans = [_Span.of(row) for row in rows if row.get("prefill_s") and row.get("decode_s")]
    if not spans:
        return
    ends = np.array([s.end_s for s in spans])
    decode = np.array([s.decode_s for s in spans])
    first = ends - decode
    prefill_from = first - np.array([s.prefill_s for s in spans])
    prompt = np.array([s.prompt for s in spans], float)
    pairs = prompt * (np.array([s.cached for s in spans]) + prompt / 2)
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
                    "prefill_pair_s": float((others * pairs).sum()),
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
                "prefill_pair_s": float((shared * pairs).sum()),
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
    cached: int
    output: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> _Span:
        cached = int(row.get("cached_tokens", 0))
        times = float(row["time"]), float(row["prefill_s"]), float(row["decode_s"])
        return cls(*times, max(1, int(row["prompt_tokens"]) - cached), cached, int(row["completion_tokens"]))


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
    weights = np.ones(len(rows))
    for _ in range(_ROUNDS):
        found, _ = nnls(rows / scale * weights[:, None], weights)
        found = found / scale
        errors = np.abs(rows @ found - 1.0)
        weights = 1.0 / np.sqrt(np.maximum(errors, _GOOD))
    values: dict[str, Any] = {
        name: float(f"{max(value, _SMALLEST):.4g}") for name, value in zip(names, found.tolist(), strict=True)
    }
    model = replace(base, **values)
    return Fitted(model, float(np.median(errors)), float(np.quantile(errors, 0.95)), len(rows))

"""Requests as arrays, and how to make a trace faster, denser or shorter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autoscaling.traces.formats import TraceError, read_trace


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """`at_s`: ascending seconds from the start, below `duration_s`. `prompt_tokens` are those to be computed; what
    a recorded prefix cache had is left out. `notes`: all that was done to the traffic, for the report."""

    name: str
    at_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    duration_s: float
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def rate(self) -> float:
        """Mean requests per second."""
        return len(self) / self.duration_s


def load_trace(path: Path) -> Trace:
    """Raises TraceError."""
    rows = read_trace(path)
    return Trace(
        path.stem,
        np.array([r.at_s for r in rows]),
        np.array([max(1, r.prompt_tokens - r.cached_tokens) for r in rows], np.int64),
        np.array([r.output_tokens for r in rows], np.int64),
        rows[-1].at_s + 1.0,
        (f"{len(rows)} recorded requests",),
    )


def speed_up(trace: Trace, factor: float) -> Trace:
    """The same requests in 1 / factor of the time: bursts get shorter too."""
    return Trace(
        trace.name,
        trace.at_s / factor,
        trace.prompt_tokens,
        trace.output_tokens,
        trace.duration_s / factor,
        (*trace.notes, f"played {factor:g} times as fast"),
    )


def scale_rate(trace: Trace, factor: float, seed: int) -> Trace:
    """`factor` times the requests in the same time, with the shape of the traffic kept. Below 1 some are left out at
    random; above, each is repeated, with the lengths of another one of the same minute or so, within 2 s of its time:
    more users of the same kind, not the same ones in step."""
    rng = np.random.default_rng([seed, 1])
    copies = np.full(len(trace), int(factor)) + (rng.random(len(trace)) < factor - int(factor))
    if not copies.sum():
        raise TraceError(f"{trace.name}: a rate scaled by {factor:g} leaves no requests")
    source = np.repeat(np.arange(len(trace)), copies)
    first = np.concatenate([[True], source[1:] != source[:-1]])
    at_s = trace.at_s[source] + np.where(first, 0.0, rng.uniform(-2.0, 2.0, len(source)))
    at_s = np.clip(at_s, 0.0, np.nextafter(trace.duration_s, 0.0))
    near = source + np.where(first, 0, rng.integers(-50, 51, len(source)))
    lengths = np.clip(near, 0, len(trace) - 1)
    order = np.argsort(at_s, kind="stable")
    return Trace(
        trace.name,
        at_s[order],
        trace.prompt_tokens[lengths][order],
        trace.output_tokens[lengths][order],
        trace.duration_s,
        (*trace.notes, f"{factor:g} times the requests"),
    )


def fit_limits(trace: Trace, max_tokens: int) -> Trace:
    """Without the requests that no replica could ever hold."""
    fits = trace.prompt_tokens + trace.output_tokens <= max_tokens
    if not fits.any():
        raise TraceError(f"{trace.name}: every request needs more than the {max_tokens} tokens of K/V of a replica")
    if fits.all():
        return trace
    return Trace(
        trace.name,
        trace.at_s[fits],
        trace.prompt_tokens[fits],
        trace.output_tokens[fits],
        trace.duration_s,
        (*trace.notes, f"{int((~fits).sum())} requests left out: longer than the {max_tokens} tokens of K/V"),
    )

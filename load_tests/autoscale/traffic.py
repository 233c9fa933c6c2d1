"""The traffic of a validation: a generated or recorded trace, cut and sped up to some minutes, as a file that both
sides read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from autoscaling.traces.generators import GENERATORS, generate
from autoscaling.traces.trace import Trace, load_trace, speed_up
from load_tests.errors import LoadError

_SPEEDUP = 8.0  # of generated traces: their bursts last minutes
_EPOCH = datetime(2024, 1, 1, tzinfo=UTC)


def make_trace(name_or_file: str, seconds: float, rate: float, seed: int) -> Trace:
    """About `rate` requests a second for about `seconds`. Of a recorded file, the first so many. Raises LoadError."""
    try:
        if name_or_file in GENERATORS:
            return speed_up(generate(name_or_file, rate / _SPEEDUP, seconds * _SPEEDUP, seed), _SPEEDUP)
        whole = load_trace(Path(name_or_file))
    except ValueError as error:
        raise LoadError(str(error)) from None
    n = min(len(whole), round(rate * seconds))
    at_s = whole.at_s[:n]
    notes = (*whole.notes, f"the first {n}")
    first = Trace(whole.name, at_s, whole.prompt_tokens[:n], whole.output_tokens[:n], float(at_s[-1]) + 1.0, notes)
    return speed_up(first, first.duration_s / seconds)


def within(trace: Trace, max_prompt: int, max_output: int) -> Trace:
    """Longer requests are cut to these lengths."""
    prompt, output = np.minimum(trace.prompt_tokens, max_prompt), np.minimum(trace.output_tokens, max_output)
    return Trace(trace.name, trace.at_s, prompt, output, trace.duration_s, trace.notes)


def write_trace(trace: Trace, path: Path) -> None:
    """In the format of the Azure traces. The first request comes at 0."""
    rows = zip(trace.at_s - trace.at_s[0], trace.prompt_tokens, trace.output_tokens, strict=True)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for at_s, prompt, output in rows:
        when = _EPOCH + timedelta(seconds=float(at_s))
        lines.append(f"{when:%Y-%m-%d %H:%M:%S.%f},{prompt},{output}")
    path.write_text("\n".join(lines) + "\n")

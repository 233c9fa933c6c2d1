"""Decisions as JSON lines, in a file of their own."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from autoscaling.base import Decision, Signals

_MAX_BYTES = 16 * 2**20  # of one file: some 20,000 lines, two weeks of a quiet pool
_KEPT = 4  # older files
_AT_LEAST_EVERY_S = 60.0  # so that the log shows signals even while nothing changes


class DecisionLog:
    """Appends what changes the target, what begins or ends a fault, and one decision a minute besides. Without a file
    it does nothing."""

    def __init__(self, pool: str, path: Path | None) -> None:
        """Raises OSError."""
        self._pool = pool
        self._file: RotatingFileHandler | None = None
        self._last: tuple[int, str | None] | None = None
        self._written_s = -math.inf
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = RotatingFileHandler(path, maxBytes=_MAX_BYTES, backupCount=_KEPT)

    def write(self, signals: Signals, decision: Decision, now_s: float) -> None:
        """Told every decision; appends those that are worth a line."""
        said = decision.target, decision.fault
        if self._file is None:
            return
        if decision.target == signals.target and said == self._last and now_s - self._written_s < _AT_LEAST_EVERY_S:
            return
        self._last, self._written_s = said, now_s
        line = json.dumps(as_dict(self._pool, signals, decision, now_s))
        self._file.emit(logging.LogRecord("decisions", logging.INFO, "", 0, line, None, None))


def as_dict(pool: str, signals: Signals, decision: Decision, now_s: float) -> dict[str, Any]:
    """`from` is the target before, `to` the one decided. What is unknown is left out of the signals."""
    return {
        "time": round(now_s, 3),
        "pool": pool,
        "from": signals.target,
        "to": decision.target,
        "why": decision.why,
        "proposed": _short(decision.proposed),
        "limits": list(decision.limits),
        "fault": decision.fault,
        "signals": {name: _short(value) for name, value in asdict(signals).items() if value is not None},
        "terms": {name: _short(value) for name, value in decision.terms.items()},
    }


def _short(value: float | None) -> float | None:
    """JSON has no NaN."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.4g}")

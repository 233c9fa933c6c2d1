"""One line a second while a run is under way: rewritten on a terminal, one below the other elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from statistics import median
from typing import TextIO

from load_tests.runner import Run

_RECENT = 100


class ProgressLine:
    """A callback for run(). Reads only what is new in the run, so that it costs the same at its end as at its
    start."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._seen = self._failed = self._tokens = 0
        self._ttfts: deque[float] = deque(maxlen=_RECENT)

    def __call__(self, run: Run) -> None:
        if not run.phases:
            return
        self._out.write(f"\r\033[K{self.text(run)}" if self._out.isatty() else f"{self.text(run)}\n")
        self._out.flush()

    def clear(self) -> None:
        if self._out.isatty():
            self._out.write("\r\033[K")
            self._out.flush()

    def text(self, run: Run) -> str:
        for outcome in run.outcomes[self._seen :]:
            self._failed += outcome.error is not None
            self._tokens += outcome.tokens
            if outcome.error is None:
                self._ttfts.append(outcome.ttft_s)
        self._seen = len(run.outcomes)
        elapsed = max(1e-3, time.perf_counter() - run.phases[0].start)
        of = f"/{run.num_planned}" if run.num_planned is not None else ""
        phase = f" {run.phases[-1].name}:" if len(run.scenario.phases) > 1 else ""
        text = f"{elapsed:.0f} s{phase} {self._seen}{of} done, {run.num_sent - self._seen} under way"
        text += f", {self._failed} failed" if self._failed else ""
        text += f", {self._tokens / elapsed:.0f} output tokens/s"
        return text + (f", ttft {median(self._ttfts) * 1000:.0f} ms" if self._ttfts else "")

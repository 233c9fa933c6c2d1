"""How a run gets on: one line with a bar while it lasts, on a terminal only."""

from __future__ import annotations

import time
from collections import deque
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from load_tests.runner import Run

_RECENT = 100  # requests of whose TTFTs the median is shown


class ProgressLine:
    """A callback for run(). Reads only what is new in the run, so that it costs the same at its end as at its
    start, and draws only when it is called: a thread that redraws would take time from the load."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        columns = (TextColumn("{task.description}", markup=False), BarColumn())
        self._bar = Progress(*columns, console=console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task("") if console.is_terminal else None
        self._seen = self._failed = self._tokens = 0
        self._ttfts: deque[float] = deque(maxlen=_RECENT)

    def __call__(self, run: Run) -> None:
        if self._task is not None and run.phases:
            self._bar.start()
            self._bar.update(self._task, description=self.text(run), completed=self._seen, total=run.num_planned)
            self._bar.refresh()

    def clear(self) -> None:
        if self._task is not None:
            self._bar.stop()

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

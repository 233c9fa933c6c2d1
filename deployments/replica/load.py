"""One replica's load as the autoscaler wants it: rates and percentiles over the last seconds. Time is an argument.

The names are those of autoscaling.base.ReplicaSample. What is not known is left out: a missing sample is not a zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from autoscaling.base import WINDOW_S
from engine.stats import nearest_rank
from engine.types import EngineStats

_RATE_DECAY = 0.98  # a step, of the rate at which prompts are computed
_MAX_SAMPLES = 4096  # of one percentile; beyond, the oldest do not count


class LoadMeter:
    """`startup_s`: what this replica took to start. update() is to be called several times a second."""

    def __init__(self, max_num_seqs: int, startup_s: float) -> None:
        self._max_num_seqs = max_num_seqs
        self._startup_s = startup_s
        self._history: deque[tuple[float, EngineStats]] = deque()
        self._ttft: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)
        self._itl: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)
        self._rate_tokens = 0.0
        self._rate_s = 0.0

    def update(
        self, now_s: float, stats: EngineStats, ttft_s: Iterable[float] = (), itl_s: Iterable[float] = ()
    ) -> None:
        """`ttft_s` and `itl_s` are those since the last update."""
        self._ttft.extend((now_s, value) for value in ttft_s)
        self._itl.extend((now_s, value) for value in itl_s)
        for samples in (self._ttft, self._itl):
            while samples and samples[0][0] < now_s - WINDOW_S:
                samples.popleft()
        if self._history:
            self._learn_rate(self._history[-1][1], stats)
        self._history.append((now_s, stats))
        while len(self._history) > 1 and self._history[1][0] <= now_s - WINDOW_S:
            self._history.popleft()

    def sample(self) -> dict[str, float]:
        """As of the last update; empty before the first one."""
        if not self._history:
            return {}
        now = self._history[-1][1]
        known: dict[str, float | None] = {
            "waiting": now.waiting,
            "running": now.running,
            "pending_tokens": now.pending_tokens,
            "backlog_s": self._backlog_s(now),
            "utilisation": self._utilisation(now),
            "seats_used": now.running / self._max_num_seqs,
            "kv_usage": now.kv_usage,
            "arrival_rate": (now.num_arrived - self._history[0][1].num_arrived) / WINDOW_S,
            "ttft_p50_s": _percentile(self._ttft, 0.50),
            "ttft_p95_s": _percentile(self._ttft, 0.95),
            "itl_p95_s": _percentile(self._itl, 0.95),
            "startup_s": self._startup_s,
        }
        return {name: float(value) for name, value in known.items() if value is not None}

    def _utilisation(self, now: EngineStats) -> float | None:
        """Unknown as long as there was no step without a prompt in it: nothing tells then what a step's fixed part is.
        Over the whole window, also by a replica that serves for less, see WINDOW_S."""
        then = self._history[0][1]
        if now.num_steps == then.num_steps:
            return 0.0
        if now.shortest_step_s is None:
            return None
        work_s = now.step_s - then.step_s - (now.num_steps - then.num_steps) * now.shortest_step_s
        return max(0.0, work_s) / WINDOW_S

    def _backlog_s(self, now: EngineStats) -> float | None:
        if not now.pending_tokens:
            return 0.0
        return now.pending_tokens * self._rate_s / self._rate_tokens if self._rate_tokens else None

    def _learn_rate(self, then: EngineStats, now: EngineStats) -> None:
        keep = _RATE_DECAY ** (now.num_prompt_steps - then.num_prompt_steps)
        self._rate_tokens = self._rate_tokens * keep + now.prompt_step_tokens - then.prompt_step_tokens
        self._rate_s = self._rate_s * keep + now.prompt_step_s - then.prompt_step_s


def _percentile(samples: deque[tuple[float, float]], q: float) -> float | None:
    """Nearest rank; None of nothing."""
    return nearest_rank(sorted(value for _, value in samples), q) if samples else None

"""One replica's load as the autoscaler wants it: rates and percentiles over the last WINDOW_S seconds.

The names are those of autoscaling.base.ReplicaSample. A value that is not known is left out rather than set to zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from autoscaling.base import WINDOW_S
from engine.stats import nearest_rank
from engine.types import EngineStats

_RATE_DECAY = 0.98  # per step, of the weight of earlier steps in the prefill rate: some fifty steps count
_MAX_SAMPLES = 4096  # of one percentile, to bound memory; the oldest ones are dropped


class LoadMeter:
    """Learns from update(), which is to be called several times a second. `startup_s`: how long the start took."""

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
        """Takes the engine's counters at `now_s`, in seconds, and the TTFT and ITL samples since the last update."""
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
        """The load at the last update(), by name. Empty before the first one."""
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
        """The share of WINDOW_S that steps took beyond their fixed part. None: that part is not known.

        It is known after the first step without prompt tokens. The share is one of the whole window also for a replica
        that has not served for so long, see WINDOW_S.
        """
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
    """The `q` quantile by nearest rank. None without samples."""
    return nearest_rank(sorted(value for _, value in samples), q) if samples else None

"""Rolling measurements of one engine, and what it tells about each finished request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import FinishReason, StepPlan, Timings


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One accepted request's ending. `reason` is that of its worst choice: error, abort, length, stop."""

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    e2e_s: float
    ttft_s: float | None
    timings: Timings


def nearest_rank(ordered: Sequence[float], q: float) -> float:
    """The percentile q in 0..1 of at least one value, smallest first."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class StepMeter:
    """What the steps took and computed since the start, for EngineStats. Used on the step thread."""

    def __init__(self) -> None:
        self.num_steps = self.num_prompt_steps = self.prompt_step_tokens = 0
        self.step_s = self.prompt_step_s = 0.0
        self.shortest_step_s: float | None = None

    def add(self, plan: StepPlan, took_s: float, num_waiting: int) -> None:
        """One step. A slice of one token, drafts apart, counts as a decode, though it may be the rest of a prompt."""
        if not plan.slices:
            return
        self.num_steps += 1
        self.step_s += took_s
        tokens = sum(n for s in plan.slices if (n := len(s.token_ids) - s.num_drafts) > 1)
        if tokens or num_waiting:
            self.num_prompt_steps += 1
            self.prompt_step_s += took_s
            self.prompt_step_tokens += tokens
        if not tokens and (self.shortest_step_s is None or took_s < self.shortest_step_s):
            self.shortest_step_s = took_s


class Recorder:
    """What happened since the last drain(): cheap appends on the step thread, taken by telemetry elsewhere.

    deque appends and popleft are atomic, so no lock is needed. Bounded: telemetry that stops draining loses
    the oldest samples, never memory.
    """

    def __init__(self, size: int = 65536) -> None:
        self.ttft_s: deque[float] = deque(maxlen=size)
        self.itl_s: deque[float] = deque(maxlen=size)
        self.finished: deque[FinishedRequest] = deque(maxlen=size)

    @staticmethod
    def drain(samples: deque[float]) -> list[float]:
        """Take what one of the deques holds, oldest first."""
        return [samples.popleft() for _ in range(len(samples))]

    def drain_finished(self) -> list[FinishedRequest]:
        """Take the finished requests, oldest first."""
        return [self.finished.popleft() for _ in range(len(self.finished))]

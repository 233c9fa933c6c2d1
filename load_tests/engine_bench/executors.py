"""Executors for engines under measurement."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from engine.executor.base import Capacity, Executor
from engine.types import SliceResult, StepPlan, StepResult

_ANY_TOKEN = 1


class Shared:
    """An engine's view of a loaded executor: closing the engine leaves the model loaded for the next one."""

    def __init__(self, inner: Executor, capacity: Capacity) -> None:
        self.capacity = capacity
        self.inner = inner
        self.announced: dict[int, int] = {}  # seq_id -> prompt length

    def start(self) -> Capacity:
        return self.capacity

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        for seq_id in plan.finished:
            self.announced.pop(seq_id, None)
        self.announced.update((new.seq_id, len(new.prompt)) for new in plan.new)
        return self.inner.submit(plan)

    def check_health(self) -> None:
        self.inner.check_health()

    def shutdown(self) -> None:
        """The ranks forget this engine's sequences: the next engine counts them from 0 again."""
        self.inner.submit(StepPlan(0, (), finished=tuple(self.announced))).result()
        self.announced.clear()


class Prefilled(Shared):
    """Prompts cost nothing: a step that holds any of one is answered without computing it, and decode steps then run
    on whatever the cache holds. `last`: the latest plan that was computed."""

    last: StepPlan | None = None

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        prompts = self.announced | {new.seq_id: len(new.prompt) for new in plan.new}
        if all(s.start >= prompts[s.seq_id] for s in plan.slices):
            self.last = plan
            return super().submit(plan)
        super().submit(StepPlan(plan.step_id, (), plan.new, plan.finished)).result()
        return answered(plan, (_ANY_TOKEN,))


class Instant:
    """No model at all: a sequence's next token is the one at its position in `tokens`, over and over."""

    def __init__(self, capacity: Capacity, tokens: Sequence[int]) -> None:
        self.capacity = capacity
        self.tokens = tuple(tokens)

    def start(self) -> Capacity:
        return self.capacity

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        return answered(plan, self.tokens)

    def check_health(self) -> None:
        """There is nothing to lose."""

    def shutdown(self) -> None:
        """There is nothing to free."""


def answered(plan: StepPlan, tokens: Sequence[int]) -> Future[StepResult]:
    future: Future[StepResult] = Future()
    future.set_result(result_of(plan, tokens))
    return future


def result_of(plan: StepPlan, tokens: Sequence[int]) -> StepResult:
    ends = (s.start + len(s.token_ids) if s.sample else None for s in plan.slices)
    return StepResult(
        plan.step_id, tuple(SliceResult(() if end is None else (tokens[end % len(tokens)],)) for end in ends)
    )

"""Which waiting sequences begin to run."""

from __future__ import annotations

from enum import Enum, auto

from engine.config import EngineConfig
from engine.kv.base import KVCache, PrefixHit
from engine.scheduler.chunk_planner import ChunkPlanner
from engine.scheduler.plan_builder import PlanBuilder
from engine.scheduler.queue import WaitingQueue
from engine.scheduler.running import RunningSet, spare_blocks
from engine.types import Sequence


class _Outcome(Enum):
    """What became of the attempt to admit a sequence."""

    ADMITTED = auto()
    NO_ROOM = auto()  # the running limit is reached, or blocks are lacking
    NO_BUDGET = auto()  # its prompt would get no tokens of this step
    MANY_LONG = auto()  # enough prompts as long as this one are in progress


class Admitter:
    """Admits waiting sequences in the queue's order while the running limit, the blocks and the budget allow it.

    A sequence takes blocks for all its tokens at once, so that blocks seen as free are free and not promised to
    prompts in progress. One for which there is no room is not overtaken, except by preemption: a more important one may
    preempt less important ones that run. One that only has to wait for other prompts is passed by shorter ones, until
    it is the one that has waited longest.
    """

    def __init__(
        self, config: EngineConfig, kv: KVCache, queue: WaitingQueue, running: RunningSet, chunks: ChunkPlanner
    ) -> None:
        self._max_long = config.max_long_prefills
        self._long_tokens = config.long_prefill_tokens
        self._kv = kv
        self._queue = queue
        self._running = running
        self._chunks = chunks

    def run(self, step: PlanBuilder, now_s: float) -> None:
        """Admit all that can run in this step."""
        while self._admit_one(step, now_s):
            pass

    def _admit_one(self, step: PlanBuilder, now_s: float) -> bool:
        head, urgent = self._queue.peek(), self._queue.urgent()
        if head is None or urgent is None or self._queue.class_of(urgent) >= step.admit_below:
            return False
        if step.admit_below < float("inf"):
            head = urgent
        outcome = self._try(head, step, now_s)
        if outcome in (_Outcome.NO_BUDGET, _Outcome.MANY_LONG) and urgent is not head:
            turn, outcome = outcome, self._try(urgent, step, now_s)
            if outcome is _Outcome.NO_ROOM:
                return self._preempt_for(urgent, 0, step, now_s)
            outcome = turn if outcome is not _Outcome.ADMITTED else outcome
        if outcome in (_Outcome.NO_BUDGET, _Outcome.MANY_LONG):
            short = self._queue.short(min(self._long_tokens, len(head.tokens)))
            outcome = outcome if short is None else self._try(short, step, now_s)
        elif outcome is _Outcome.NO_ROOM:
            return self._preempt_for(urgent, self._kv.num_free if urgent is head else 0, step, now_s)
        return outcome is _Outcome.ADMITTED

    def _try(self, seq: Sequence, step: PlanBuilder, now_s: float) -> _Outcome:
        if not self._running.num_free:
            return _Outcome.NO_ROOM
        if self._chunks.budget(self._queue.class_of(seq), step) <= 0:
            return _Outcome.NO_BUDGET
        hit = self._kv.lookup(seq)
        if (reason := self._must_wait(seq, hit, step)) is not None:
            return reason
        return _Outcome.ADMITTED if self._admit(seq, hit, step, now_s) else _Outcome.NO_ROOM

    def _preempt_for(self, seq: Sequence, num_free: int, step: PlanBuilder, now_s: float) -> bool:
        if not self._running.has_lesser(seq):
            return False
        hit = self._kv.lookup(seq)
        victims = self._running.victims(seq, hit, num_free, step)
        if not victims or self._must_wait(seq, hit, step) is not None:
            return False
        for victim in victims:
            self._running.preempt(victim, step)
        return self._admit(seq, self._kv.lookup(seq), step, now_s)

    def _must_wait(self, seq: Sequence, hit: PrefixHit, step: PlanBuilder) -> _Outcome | None:
        pending = len(seq.tokens) - hit.num_tokens
        if pending >= self._long_tokens:
            cls, class_of = self._queue.class_of(seq), self._queue.class_of
            longer = sum(p.num_pending >= self._long_tokens and class_of(p) <= cls for p in step.prompts)
            if longer >= self._max_long:
                return _Outcome.MANY_LONG
        return None if self._chunks.has_budget(seq, pending, step) else _Outcome.NO_BUDGET

    def _admit(self, seq: Sequence, hit: PrefixHit, step: PlanBuilder, now_s: float) -> bool:
        spare = spare_blocks(seq, len(self._running.sequences))
        if not self._kv.reserve(seq, len(seq.tokens) - hit.num_tokens, hit, spare):
            return False
        self._running.add(seq, step, now_s)
        return True

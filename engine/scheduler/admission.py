"""Who gets a seat next."""

from __future__ import annotations

from enum import Enum, auto

from engine.config import EngineConfig
from engine.kv.base import KVCache, PrefixHit
from engine.scheduler.chunks import Chunks
from engine.scheduler.queue import WaitingQueue
from engine.scheduler.seats import Seats, spare_blocks
from engine.scheduler.step import Step
from engine.types import Sequence


class _Outcome(Enum):
    SEATED = auto()
    FULL = auto()  # no seat, or no blocks
    BUSY = auto()  # its prompt would get nothing of this step
    LONG = auto()  # enough prompts as long as this one are in progress


class Admission:
    """Seats waiting sequences in the queue's order for as long as there are seats, blocks and something to do.

    A sequence takes blocks for all its tokens at once, so that blocks seen as free are free and not promised to
    prompts in progress. Who lacks seat or blocks is not overtaken, except by preemption: a more important one may
    take the room of less important ones that run. Who only has to wait for other prompts is passed by shorter ones,
    until it is the one that has waited longest.
    """

    def __init__(self, config: EngineConfig, kv: KVCache, queue: WaitingQueue, seats: Seats, chunks: Chunks) -> None:
        self._max_long = config.max_long_prefills
        self._long_tokens = config.long_prefill_tokens
        self._kv = kv
        self._queue = queue
        self._seats = seats
        self._chunks = chunks

    def run(self, step: Step, now_s: float) -> None:
        while self._seat_one(step, now_s):
            pass

    def _seat_one(self, step: Step, now_s: float) -> bool:
        head, urgent = self._queue.peek(), self._queue.urgent()
        if head is None or urgent is None or self._queue.class_of(urgent) >= step.barrier:
            return False
        if step.barrier < float("inf"):
            head = urgent
        outcome = self._try(head, step, now_s)
        if outcome in (_Outcome.BUSY, _Outcome.LONG) and urgent is not head:
            turn, outcome = outcome, self._try(urgent, step, now_s)
            if outcome is _Outcome.FULL:
                return self._preempt_for(urgent, 0, step, now_s)
            outcome = turn if outcome is not _Outcome.SEATED else outcome
        if outcome in (_Outcome.BUSY, _Outcome.LONG):
            short = self._queue.short(min(self._long_tokens, len(head.tokens)))
            outcome = outcome if short is None else self._try(short, step, now_s)
        elif outcome is _Outcome.FULL:
            return self._preempt_for(urgent, self._kv.num_free if urgent is head else 0, step, now_s)
        return outcome is _Outcome.SEATED

    def _try(self, seq: Sequence, step: Step, now_s: float) -> _Outcome:
        if not self._seats.free:
            return _Outcome.FULL
        if self._chunks.room(self._queue.class_of(seq), step) <= 0:
            return _Outcome.BUSY
        hit = self._kv.lookup(seq)
        if (reason := self._must_wait(seq, hit, step)) is not None:
            return reason
        return _Outcome.SEATED if self._seat(seq, hit, step, now_s) else _Outcome.FULL

    def _preempt_for(self, seq: Sequence, num_free: int, step: Step, now_s: float) -> bool:
        if not self._seats.has_lesser(seq):
            return False
        hit = self._kv.lookup(seq)
        victims = self._seats.victims(seq, hit, num_free, step)
        if not victims or self._must_wait(seq, hit, step) is not None:
            return False
        for victim in victims:
            self._seats.preempt(victim, step)
        return self._seat(seq, self._kv.lookup(seq), step, now_s)

    def _must_wait(self, seq: Sequence, hit: PrefixHit, step: Step) -> _Outcome | None:
        pending = len(seq.tokens) - hit.num_tokens
        if pending >= self._long_tokens:
            cls, class_of = self._queue.class_of(seq), self._queue.class_of
            longer = sum(p.num_pending >= self._long_tokens and class_of(p) <= cls for p in step.prompts)
            if longer >= self._max_long:
                return _Outcome.LONG
        return None if self._chunks.has_room(seq, pending, step) else _Outcome.BUSY

    def _seat(self, seq: Sequence, hit: PrefixHit, step: Step, now_s: float) -> bool:
        spare = spare_blocks(seq, len(self._seats.running))
        if not self._kv.reserve(seq, len(seq.tokens) - hit.num_tokens, hit, spare):
            return False
        self._seats.give(seq, step, now_s)
        return True

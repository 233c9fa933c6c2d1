"""More important classes first, and in a class the preempted, then the others in their queue's order."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import EngineConfig
from engine.scheduler.class_queues import ClassQueue, FairQueue, FifoQueue, TenantShares
from engine.types import Sequence

_WINDOW = 16
"""So many sequences from the front a short prompt may be and still pass a long one that has to wait. It bounds the cost
of a step; the order of arrival beyond it is kept."""


class ByPriority:
    """The policy `priority`, with ageing.

    A sequence comes before one of a class that is n steps more important if it arrived n times `priority_ageing_s`
    before it. Between two sequences that never changes, so nothing is ever sorted again, and whatever keeps arriving
    nothing starves. Operations cost O(classes), a handful.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._ageing_s = config.priority_ageing_s
        self._shares = TenantShares() if config.fair_sharing else None
        self._queues: dict[int, ClassQueue] = {}
        self._tokens: dict[int, int] = {}  # by class, of those that wait
        self._seqs: dict[int, Sequence] = {}

    def class_of(self, seq: Sequence) -> int:
        """See WaitingQueue.class_of()."""
        return seq.request.priority

    def push(self, seq: Sequence) -> None:
        """See WaitingQueue.push()."""
        self._enter(seq).push(seq)

    def push_front(self, seq: Sequence) -> None:
        """See WaitingQueue.push_front()."""
        self._enter(seq).push_front(seq)

    def peek(self) -> Sequence | None:
        """See WaitingQueue.peek()."""
        if not self._queues:
            return None
        if len(self._queues) == 1:
            (queue,) = self._queues.values()
            return queue.head()
        return min(self._heads(), key=self.score)

    def urgent(self) -> Sequence | None:
        """See WaitingQueue.urgent()."""
        return self._queues[min(self._queues)].head() if self._queues else None

    def short(self, num_tokens: int) -> Sequence | None:
        """See WaitingQueue.short()."""
        first = [seq for queue in self._queues.values() for seq in queue.first(_WINDOW) if len(seq.tokens) < num_tokens]
        return min(first, key=self.score, default=None)

    def pop(self) -> Sequence:
        """See WaitingQueue.pop()."""
        seq = self.peek()
        assert seq is not None
        self.remove(seq.seq_id)
        return seq

    def remove(self, seq_id: int) -> Sequence | None:
        """See WaitingQueue.remove()."""
        seq = self._seqs.pop(seq_id, None)
        if seq is None:
            return None
        cls = self.class_of(seq)
        self._queues[cls].remove(seq)
        self._tokens[cls] -= len(seq.tokens)
        if not len(self._queues[cls]):
            del self._queues[cls], self._tokens[cls]
        return seq

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        """See WaitingQueue.charge()."""
        if self._shares is not None:
            self._shares.charge(seq.request.tenant, num_tokens)

    def score(self, seq: Sequence) -> float:
        """See WaitingQueue.score()."""
        return self.class_of(seq) * self._ageing_s + seq.arrival_s

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """See WaitingQueue.outranks()."""
        return self.class_of(waiting) < self.class_of(running) and self.score(waiting) < self.score(running)

    @property
    def num_tokens(self) -> int:
        """See WaitingQueue.num_tokens."""
        return sum(self._tokens.values())

    def tokens_ahead(self, cls: int) -> int:
        """See WaitingQueue.tokens_ahead()."""
        return sum(num_tokens for own, num_tokens in self._tokens.items() if own <= cls)

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        for cls in sorted(self._queues):
            yield from self._queues[cls]

    def _enter(self, seq: Sequence) -> ClassQueue:
        cls = self.class_of(seq)
        self._seqs[seq.seq_id] = seq
        self._tokens[cls] = self._tokens.get(cls, 0) + len(seq.tokens)
        queue = self._queues.get(cls)
        if queue is None:
            queue = self._queues[cls] = FifoQueue() if self._shares is None else FairQueue(self._shares)
        return queue

    def _heads(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            if (seq := queue.head()) is not None:
                yield seq

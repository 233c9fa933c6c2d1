"""More important classes first, and in a class the preempted, then the others in their line's order."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import EngineConfig
from engine.scheduler.lines import Fair, Fifo, Line, Shares
from engine.types import Sequence

_WINDOW = 16
"""How far from the front a short prompt may be and pass a long one that has to wait."""


class ByPriority:
    """Ageing: a sequence comes before one of a class that is n steps more important if it arrived n times
    `priority_ageing_s` before it. Between two sequences that never changes, so nothing is ever sorted again, and
    whatever keeps arriving nothing starves. Operations cost O(classes), a handful."""

    def __init__(self, config: EngineConfig) -> None:
        self._ageing_s = config.priority_ageing_s
        self._shares = Shares() if config.fair_sharing else None
        self._lines: dict[int, Line] = {}
        self._tokens: dict[int, int] = {}  # by class, of those that wait
        self._seqs: dict[int, Sequence] = {}

    def class_of(self, seq: Sequence) -> int:
        return seq.request.priority

    def push(self, seq: Sequence) -> None:
        self._enter(seq).push(seq)

    def push_front(self, seq: Sequence) -> None:
        self._enter(seq).push_front(seq)

    def peek(self) -> Sequence | None:
        if not self._lines:
            return None
        if len(self._lines) == 1:
            (line,) = self._lines.values()
            return line.head()
        return min(self._heads(), key=self.score)

    def urgent(self) -> Sequence | None:
        return self._lines[min(self._lines)].head() if self._lines else None

    def short(self, num_tokens: int) -> Sequence | None:
        first = [seq for line in self._lines.values() for seq in line.first(_WINDOW) if len(seq.tokens) < num_tokens]
        return min(first, key=self.score, default=None)

    def pop(self) -> Sequence:
        seq = self.peek()
        assert seq is not None
        self.remove(seq.seq_id)
        return seq

    def remove(self, seq_id: int) -> Sequence | None:
        seq = self._seqs.pop(seq_id, None)
        if seq is None:
            return None
        cls = self.class_of(seq)
        self._lines[cls].remove(seq)
        self._tokens[cls] -= len(seq.tokens)
        if not len(self._lines[cls]):
            del self._lines[cls], self._tokens[cls]
        return seq

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        if self._shares is not None:
            self._shares.charge(seq.request.tenant, num_tokens)

    def score(self, seq: Sequence) -> float:
        return self.class_of(seq) * self._ageing_s + seq.arrival_s

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return self.class_of(waiting) < self.class_of(running) and self.score(waiting) < self.score(running)

    @property
    def num_tokens(self) -> int:
        return sum(self._tokens.values())

    def tokens_ahead(self, cls: int) -> int:
        return sum(num_tokens for own, num_tokens in self._tokens.items() if own <= cls)

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        for cls in sorted(self._lines):
            yield from self._lines[cls]

    def _enter(self, seq: Sequence) -> Line:
        cls = self.class_of(seq)
        self._seqs[seq.seq_id] = seq
        self._tokens[cls] = self._tokens.get(cls, 0) + len(seq.tokens)
        line = self._lines.get(cls)
        if line is None:
            line = self._lines[cls] = Fifo() if self._shares is None else Fair(self._shares)
        return line

    def _heads(self) -> Iterator[Sequence]:
        for line in self._lines.values():
            if (seq := line.head()) is not None:
                yield seq

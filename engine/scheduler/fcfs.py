"""First come, first served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engine.types import Sequence


class Fcfs:
    """Every operation is O(1). (A plain dict would not do: its first key is slow to find after many removals.)"""

    def __init__(self) -> None:
        self._seqs: OrderedDict[int, Sequence] = OrderedDict()

    def push(self, seq: Sequence) -> None:
        self._seqs[seq.seq_id] = seq

    def push_front(self, seq: Sequence) -> None:
        self._seqs[seq.seq_id] = seq
        self._seqs.move_to_end(seq.seq_id, last=False)

    def peek(self) -> Sequence | None:
        return next(iter(self._seqs.values()), None)

    def pop(self) -> Sequence:
        return self._seqs.popitem(last=False)[1]

    def remove(self, seq_id: int) -> Sequence | None:
        return self._seqs.pop(seq_id, None)

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs.values())

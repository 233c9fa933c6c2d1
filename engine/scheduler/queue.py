"""The order in which sequences wait. To add a policy: one file here and one line in QUEUES."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from engine.registry import Registry
from engine.types import Sequence


class WaitingQueue(Protocol):
    """Sequences that hold no blocks. Operations must not cost O(waiting)."""

    def push(self, seq: Sequence) -> None: ...
    def push_front(self, seq: Sequence) -> None:
        """A preempted sequence comes back: before all others of its rank in this policy."""

    def peek(self) -> Sequence | None:
        """The next to be popped, if any."""

    def pop(self) -> Sequence: ...
    def remove(self, seq_id: int) -> Sequence | None:
        """Take one out wherever it stands; None if it is not here."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sequence]: ...


QUEUES: Registry[WaitingQueue] = Registry("scheduling policy", {"fcfs": "engine.scheduler.fcfs:Fcfs"})

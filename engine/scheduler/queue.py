"""The order in which sequences wait. To add a policy: one file here and one line in QUEUES."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from engine.config import EngineConfig
from engine.registry import Registry
from engine.types import Sequence


class WaitingQueue(Protocol):
    """Sequences that hold no blocks. Operations must not cost O(waiting)."""

    def __init__(self, config: EngineConfig) -> None: ...
    def push(self, seq: Sequence) -> None:
        """A sequence has arrived."""

    def push_front(self, seq: Sequence) -> None:
        """A preempted sequence comes back: before all others of its class."""

    def peek(self) -> Sequence | None:
        """The next in turn, if any."""

    def urgent(self) -> Sequence | None:
        """The next of the most important class, though others may be before it in turn because they are older."""

    def short(self, num_tokens: int) -> Sequence | None:
        """The next with fewer than num_tokens, if there is one close to the front."""

    def pop(self) -> Sequence:
        """Remove and return what peek() returns. There must be one."""

    def remove(self, seq_id: int) -> Sequence | None:
        """Take one out wherever it stands; None if it is not here."""

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        """A sequence, waiting here or not, has had so many tokens more."""

    def class_of(self, seq: Sequence) -> int:
        """Smaller is more important."""

    def score(self, seq: Sequence) -> float:
        """Class and age together: the one with less comes first. It never changes."""

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether one may preempt the other."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all waiting sequences together."""

    def tokens_ahead(self, cls: int) -> int:
        """Tokens of those in this class or a more important one."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sequence]: ...


QUEUES: Registry[WaitingQueue] = Registry(
    "scheduling policy",
    {"fcfs": "engine.scheduler.fcfs:Fcfs", "priority": "engine.scheduler.priority:ByPriority"},
)

"""First come, first served."""

from __future__ import annotations

from engine.scheduler.priority import ByPriority
from engine.types import Sequence


class Fcfs(ByPriority):
    """The policy `fcfs`: all requests are of one class."""

    def class_of(self, seq: Sequence) -> int:
        """See WaitingQueue.class_of()."""
        return 0

"""First come, first served."""

from __future__ import annotations

from engine.scheduler.priority import ByPriority
from engine.types import Sequence


class Fcfs(ByPriority):
    """All requests are of one class."""

    def class_of(self, seq: Sequence) -> int:
        return 0

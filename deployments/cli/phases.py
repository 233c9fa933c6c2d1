"""How long each part of a start takes."""

from __future__ import annotations

import time
from collections.abc import Callable


class Phases:
    """Times one part after the other, from when it is made. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = self._since_s = clock()
        self._parts: list[str] = []

    def done(self, part: str, remark: str = "") -> None:
        """What was worked at since the last part, or since the beginning, was `part`."""
        now_s = self._clock()
        self._parts.append(f"{part} {now_s - self._since_s:.1f} s{remark}")
        self._since_s = now_s

    def __str__(self) -> str:
        return f"{self._since_s - self._began_s:.1f} s: {', '.join(self._parts)}"


class Compiling:
    """Adds up for how long something was seen at work by somebody who looks now and then."""

    def __init__(self, at_work: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._at_work = at_work
        self._clock = clock
        self._since_s: float | None = None
        self._spent_s = 0.0

    def look(self) -> bool:
        """Whether it is at work now."""
        now_s, busy = self._clock(), self._at_work()
        if self._since_s is not None:
            self._spent_s += now_s - self._since_s
        self._since_s = now_s if busy else None
        return busy

    def remark(self) -> str:
        """For Phases.done(); empty when nothing was compiled."""
        return f" ({self._spent_s:.1f} s of it compiling kernels, once per machine)" if self._spent_s else ""

"""The counter of one limit, pure: a sliding minute for requests and tokens, a plain count for requests running.

A token bucket of capacity L refilled at L per minute lets up to 2 L through in some minute. Here everything admitted
counts for a full minute and then no longer, so that no 60 seconds ever hold more than the limit, and a client that
keeps asking gets all of it. Time is cut into slices of 0.1 s and a slice leaves as a whole, when its last moment is a
minute old: at most 601 numbers per limit however many requests, for at most 0.17 % of the limit.
"""

from __future__ import annotations

from typing import Protocol

from deployments.limits.base import WINDOW_S, LimitKind

SLICES_PER_S = 10
SLICES = int(WINDOW_S * SLICES_PER_S)
_ROUNDING_S = 0.001  # so that a wait that is rounded to milliseconds never ends just before its slice does
_RUNNING_WAIT_S = 1.0  # told to those who wait for a running request to end; nobody knows when it will


class LimitCounter(Protocol):
    """What one limit counts. `now_s` may come from any clock, as long as it is always the same one."""

    def used(self, now_s: float) -> int:
        """What counts now."""
        ...

    def add(self, amount: int, now_s: float) -> int:
        """Counts `amount` more. Returns the mark under which it can be given back."""
        ...

    def give_back(self, amount: int, mark: int) -> None:
        """Counts `amount` less, at most what was added under `mark`."""
        ...

    def wait_s(self, amount: int, now_s: float) -> float:
        """Seconds until at least `amount` (more than 0) of what is used has become free, if nothing is added."""
        ...

    def reset_s(self, now_s: float) -> float:
        """Seconds until all is free."""
        ...


class SlidingWindow:
    """Counts the last minute. When the clock steps back, everything that counts is taken to be of the present, so that
    nothing counts for longer than a minute after the step."""

    __slots__ = ("_slices", "_total")

    def __init__(self) -> None:
        self._slices: dict[int, int] = {}  # slice -> amount, oldest first
        self._total = 0

    def used(self, now_s: float) -> int:
        """See LimitCounter."""
        now = int(now_s * SLICES_PER_S)
        while self._slices:
            oldest = next(iter(self._slices))
            if now - oldest <= SLICES:
                break
            self._total -= self._slices.pop(oldest)
        if self._slices and next(reversed(self._slices)) > now:
            self._slices = {now: self._total}
        return self._total

    def add(self, amount: int, now_s: float) -> int:
        """See LimitCounter."""
        self.used(now_s)
        now = int(now_s * SLICES_PER_S)
        if amount:
            self._slices[now] = self._slices.get(now, 0) + amount
            self._total += amount
        return now

    def give_back(self, amount: int, mark: int) -> None:
        """See LimitCounter."""
        held = self._slices.get(mark, 0)  # less than was added when the slice has left, or the clock stepped back
        amount = min(amount, held)
        if amount:
            self._total -= amount
            if held > amount:
                self._slices[mark] = held - amount
            else:
                del self._slices[mark]

    def wait_s(self, amount: int, now_s: float) -> float:
        """See LimitCounter."""
        self.used(now_s)
        for mark, freed in self._slices.items():
            amount -= freed
            if amount <= 0:
                return self._until_gone_s(mark, now_s)
        return self.reset_s(now_s)

    def reset_s(self, now_s: float) -> float:
        """See LimitCounter."""
        self.used(now_s)
        return self._until_gone_s(next(reversed(self._slices)), now_s) if self._slices else 0.0

    @staticmethod
    def _until_gone_s(mark: int, now_s: float) -> float:
        return (mark + SLICES + 1) / SLICES_PER_S - now_s + _ROUNDING_S


class RunningCount:
    """Counts what runs now."""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken = 0

    def used(self, now_s: float) -> int:
        """See LimitCounter."""
        return self._taken

    def add(self, amount: int, now_s: float) -> int:
        """See LimitCounter."""
        self._taken += amount
        return 0

    def give_back(self, amount: int, mark: int) -> None:
        """See LimitCounter."""
        self._taken -= amount

    def wait_s(self, amount: int, now_s: float) -> float:
        """See LimitCounter."""
        return _RUNNING_WAIT_S

    def reset_s(self, now_s: float) -> float:
        """See LimitCounter."""
        return _RUNNING_WAIT_S if self._taken else 0.0


def new_counter(kind: LimitKind) -> LimitCounter:
    """An empty counter for limits of this kind."""
    return RunningCount() if kind is LimitKind.CONCURRENT else SlidingWindow()

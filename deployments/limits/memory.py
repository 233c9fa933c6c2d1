"""Counts in this process: exact for one gateway replica, and gone with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

from deployments.config.limits import LimitsConfig
from deployments.limits.base import Amount, Grant, Limit, LimitState, Refusal, Reservation
from deployments.limits.counters import Counters


class MemoryStore:
    """A LimitStore that is never out of reach."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counters = Counters()

    @classmethod
    def from_config(cls, config: LimitsConfig, counters: Any) -> Self:
        """See ConfiguredStore."""
        return cls()

    async def reserve(self, reservation: Reservation) -> Grant | Refusal:
        """See LimitStore."""
        return self._counters.reserve(reservation, self._clock())

    def settle(self, reservation: Reservation, used: Amount) -> None:
        """See LimitStore."""
        self._counters.settle(reservation.id, used, self._clock())

    async def peek(self, limits: tuple[Limit, ...], org: str) -> tuple[LimitState, ...]:
        """See LimitStore."""
        return self._counters.peek(limits, self._clock())

    async def close(self) -> None:
        """See LimitStore."""

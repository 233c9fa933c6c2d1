"""What becomes of requests while the store is out of reach."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from deployments.limits.base import (
    Amount,
    Grant,
    Limit,
    LimitState,
    LimitStore,
    LimitStoreDownError,
    Refusal,
    Reservation,
)
from deployments.limits.memory import MemoryStore

log = logging.getLogger("ray.serve")


class OutageGuard:
    """A LimitStore that asks `store`, and after a failure not again before the time that the failure named. Meanwhile
    reservations fail if `gateways` is None. Else they are counted here, each limit divided by that number of gateways.
    What the store had counted is not known here, so a minute with an outage in it can hold up to twice a limit."""

    def __init__(
        self, store: LimitStore, gateways: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._gateways = gateways
        self._clock = clock
        self._local = MemoryStore(clock)
        self._counted_here: set[str] = set()
        self._down_until_s = 0.0
        self._down = False

    async def reserve(self, reservation: Reservation) -> Grant | Refusal:
        """See LimitStore."""
        wait_s = self._down_until_s - self._clock()
        if wait_s <= 0:
            try:
                outcome = await self._store.reserve(reservation)
            except LimitStoreDownError as error:
                self._on_asked(down=True)
                wait_s = error.retry_after_s
                self._down_until_s = self._clock() + wait_s
            else:
                self._on_asked(down=False)
                return outcome
        if self._gateways is None:
            raise LimitStoreDownError(wait_s)
        outcome = await self._local.reserve(replace(reservation, limits=self._shares(reservation.limits)))
        if isinstance(outcome, Grant):
            self._counted_here.add(reservation.id)
        return outcome

    def settle(self, reservation: Reservation, used: Amount) -> None:
        """See LimitStore."""
        if reservation.id in self._counted_here:
            self._counted_here.discard(reservation.id)
            self._local.settle(reservation, used)
        else:
            self._store.settle(reservation, used)

    async def peek(self, limits: tuple[Limit, ...], org: str) -> tuple[LimitState, ...]:
        """See LimitStore."""
        if self._clock() >= self._down_until_s:
            return await self._store.peek(limits, org)
        if self._gateways is None:
            raise LimitStoreDownError(self._down_until_s - self._clock())
        return await self._local.peek(self._shares(limits), org)

    async def close(self) -> None:
        """See LimitStore."""
        await self._store.close()

    def _shares(self, limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
        return tuple(replace(limit, maximum=max(1, limit.maximum // (self._gateways or 1))) for limit in limits)

    def _on_asked(self, down: bool) -> None:
        if down != self._down:
            self._down = down
            log.warning("the limit store is %s", "out of reach" if down else "back")

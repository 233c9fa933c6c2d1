"""What becomes of requests while the store is out of reach."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from deployments.limits.base import Amount, Claim, Grant, Meter, Refusal, State, Store, StoreDownError
from deployments.limits.memory import MemoryStore

log = logging.getLogger("ray.serve")


class Guarded:
    """A store that asks `store`, and after a failure not again before the time the failure named. `gateways` None:
    claims fail meanwhile. Else they are counted here, from nothing, each limit divided by that number of gateways: what
    the store had counted is not known here, so a minute with an outage in it can hold up to twice a limit."""

    def __init__(self, store: Store, gateways: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._gateways = gateways
        self._clock = clock
        self._local = MemoryStore(clock)
        self._locals: set[str] = set()
        self._down_until_s = 0.0
        self._down = False

    async def reserve(self, claim: Claim) -> Grant | Refusal:
        wait_s = self._down_until_s - self._clock()
        if wait_s <= 0:
            try:
                outcome = await self._store.reserve(claim)
            except StoreDownError as error:
                self._went(down=True)
                wait_s = error.retry_after_s
                self._down_until_s = self._clock() + wait_s
            else:
                self._went(down=False)
                return outcome
        if self._gateways is None:
            raise StoreDownError(wait_s)
        self._locals.add(claim.id)
        return await self._local.reserve(replace(claim, meters=self._shares(claim.meters)))

    def settle(self, claim: Claim, used: Amount) -> None:
        if claim.id in self._locals:
            self._locals.discard(claim.id)
            self._local.settle(claim, used)
        else:
            self._store.settle(claim, used)

    async def peek(self, meters: tuple[Meter, ...], org: str) -> tuple[State, ...]:
        if self._clock() >= self._down_until_s:
            return await self._store.peek(meters, org)
        if self._gateways is None:
            raise StoreDownError(self._down_until_s - self._clock())
        return await self._local.peek(self._shares(meters), org)

    async def close(self) -> None:
        await self._store.close()

    def _shares(self, meters: tuple[Meter, ...]) -> tuple[Meter, ...]:
        return tuple(replace(meter, limit=max(1, meter.limit // (self._gateways or 1))) for meter in meters)

    def _went(self, down: bool) -> None:
        if down != self._down:
            self._down = down
            log.warning("the limit store is %s", "out of reach" if down else "back")

"""Counts in a Redis server, for gateways that share no Ray cluster."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from deployments.config.limits import LimitsConfig
from deployments.limits.base import (
    NOTHING,
    Amount,
    Grant,
    Limit,
    LimitKind,
    LimitState,
    LimitStoreDownError,
    Refusal,
    Reservation,
)
from deployments.limits.redis_script import PEEK, RENEW, REOPEN, RESERVE, SETTLE

_TIMEOUT_S = 1.0  # for one answer of the server; it takes less than a millisecond when it is well
_PAUSE_S = 0.25  # after a failure, before ended reservations are sent again
_BATCH = 100  # reservations in one command
_DOWN = (RedisError, OSError, TimeoutError)


class RedisStore:
    """A LimitStore. Open reservations are renewed while this process lives. Those of a dead process are given up after
    `lease_s` seconds, when their organisation next asks; if the process was only silent, it opens them anew. `clock`
    None: the server's own."""

    def __init__(self, url: str, lease_s: float, clock: Callable[[], float] | None = None) -> None:
        self._redis = Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        self._reserve = self._redis.register_script(RESERVE)
        self._settle = self._redis.register_script(SETTLE)
        self._renew = self._redis.register_script(RENEW)
        self._reopen = self._redis.register_script(REOPEN)
        self._peek = self._redis.register_script(PEEK)
        self._lease_s = lease_s
        self._clock = clock
        self._open: dict[str, Reservation] = {}
        self._ended: list[tuple[Reservation, Amount]] = []
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    def from_config(cls, config: LimitsConfig, counters: Any) -> Self:
        """See ConfiguredStore."""
        return cls(config.resolved_redis_url(), config.lease_s)

    async def reserve(self, reservation: Reservation) -> Grant | Refusal:
        """See LimitStore."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._send_ended()), asyncio.create_task(self._keep_renewing())]
        self._open[reservation.id] = reservation
        try:
            answer = await self._reserve(*self._reserve_args(reservation))
        except _DOWN:
            self.settle(reservation, NOTHING)  # it may have been granted all the same
            raise LimitStoreDownError from None
        except BaseException:
            self.settle(reservation, NOTHING)
            raise
        fits, numbers = answer[0], answer[1:]
        states = _states(reservation.limits, numbers[0::3], numbers[1::3])
        if fits:
            return Grant(states)
        del self._open[reservation.id]
        return _refusal(reservation, states, numbers[2::3])

    def settle(self, reservation: Reservation, used: Amount) -> None:
        """See LimitStore."""
        if self._open.pop(reservation.id, None) is not None:
            self._ended.append((reservation, used))
            self._wake.set()

    async def peek(self, limits: tuple[Limit, ...], org: str) -> tuple[LimitState, ...]:
        """See LimitStore."""
        keys = [_key(org, limit.name) for limit in limits]
        try:
            answer = await self._peek(keys, [self._now(), *(limit.kind.value for limit in limits)])
        except _DOWN:
            raise LimitStoreDownError from None
        return _states(limits, answer[0::2], answer[1::2])

    async def close(self) -> None:
        """See LimitStore."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(*_DOWN):  # then the leases' end settles what is left
            await self._flush()
        await self._redis.aclose()

    async def renew(self) -> None:
        """Tells the server that who holds the open reservations lives. It happens by itself, three times per lease.
        Those that it has given up meanwhile are opened anew."""
        ids: dict[str, list[str]] = defaultdict(list)
        for reservation in self._open.values():
            ids[reservation.org].append(reservation.id)
        for org, members in ids.items():
            for i in range(0, len(members), _BATCH):
                args: list[Any] = [self._now(), self._lease_s, *members[i : i + _BATCH]]
                for gone in await self._renew([_key(org, "leases")], args):
                    if (still_open := self._open.get(gone.decode())) is not None:
                        await self._open_anew(still_open)

    async def _open_anew(self, reservation: Reservation) -> None:
        org, limits = reservation.org, [m for m in reservation.limits if m.kind is LimitKind.CONCURRENT]
        keys = [_key(org, "open"), _key(org, "leases"), *(_key(org, limit.name) for limit in limits)]
        costs = [reservation.cost(limit.kind) for limit in limits]
        await self._reopen(keys, [self._now(), reservation.id, self._lease_s, *costs])

    def _reserve_args(self, reservation: Reservation) -> tuple[list[str], list[Any]]:
        keys = [
            _key(reservation.org, "open"),
            _key(reservation.org, "leases"),
            *(_key(reservation.org, m.name) for m in reservation.limits),
        ]
        args: list[Any] = [self._now(), reservation.id, self._lease_s]
        for limit in reservation.limits:
            args += (limit.kind.value, limit.maximum, reservation.cost(limit.kind))
        return keys, args

    async def _send_ended(self) -> None:
        """Tells the server what has ended. Runs until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._flush()
            except _DOWN:
                self._wake.set()
                await asyncio.sleep(_PAUSE_S)

    async def _flush(self) -> None:
        while batch := self._ended[:_BATCH]:
            async with self._redis.pipeline(transaction=False) as pipe:
                for reservation, used in batch:
                    keys = [_key(reservation.org, "open"), _key(reservation.org, "leases")]
                    await self._settle(keys, [self._now(), reservation.id, used.requests, used.tokens], client=pipe)
                await pipe.execute()
            del self._ended[: len(batch)]

    async def _keep_renewing(self) -> None:
        """Keeps alive what is open. Runs until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            with suppress(*_DOWN):
                await self.renew()

    def _now(self) -> str:
        return "" if self._clock is None else repr(self._clock())


def _key(org: str, name: str) -> str:
    return f"sluicegate:{{{org.replace('}', '%7D')}}}:{name}"


def _states(limits: tuple[Limit, ...], used: list[int], reset_ms: list[int]) -> tuple[LimitState, ...]:
    return tuple(LimitState(m, u, r / 1000) for m, u, r in zip(limits, used, reset_ms, strict=True))


def _refusal(reservation: Reservation, states: tuple[LimitState, ...], wait_ms: list[int]) -> Refusal:
    waits = [
        float("inf") if reservation.cost(s.limit.kind) > s.limit.maximum else ms / 1000
        for s, ms in zip(states, wait_ms, strict=True)
    ]
    worst = max(range(len(waits)), key=waits.__getitem__)
    state, wait_s = states[worst], waits[worst]
    return Refusal(states, state, reservation.cost(state.limit.kind), None if wait_s == float("inf") else wait_s)

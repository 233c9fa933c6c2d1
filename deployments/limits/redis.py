"""Counts in a Redis server, for gateways that share no Ray cluster."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from deployments.limits.base import NOTHING, Amount, Claim, Grant, Meter, Refusal, State, StoreDownError
from deployments.limits.redis_script import PEEK, RENEW, RESERVE, SETTLE

_TIMEOUT_S = 1.0
_PAUSE_S = 0.25  # after a failure
_BATCH = 100
_DOWN = (RedisError, OSError, TimeoutError)


class RedisStore:
    """See base.Store. Open claims are renewed while this process lives; those of a dead one are given up after
    `lease_s`, when their organisation next asks. `clock` in place of the server's is for tests."""

    def __init__(self, url: str, lease_s: float, clock: Callable[[], float] | None = None) -> None:
        self._redis = Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        self._reserve = self._redis.register_script(RESERVE)
        self._settle = self._redis.register_script(SETTLE)
        self._renew = self._redis.register_script(RENEW)
        self._peek = self._redis.register_script(PEEK)
        self._lease_s = lease_s
        self._clock = clock
        self._open: dict[str, Claim] = {}
        self._ended: list[tuple[Claim, Amount]] = []
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def reserve(self, claim: Claim) -> Grant | Refusal:
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._tell()), asyncio.create_task(self._stay())]
        self._open[claim.id] = claim
        try:
            answer = await self._reserve(*self._reserve_args(claim))
        except _DOWN:
            self.settle(claim, NOTHING)  # it may have been granted all the same
            raise StoreDownError from None
        except BaseException:
            self.settle(claim, NOTHING)
            raise
        fits, numbers = answer[0], answer[1:]
        states = _states(claim.meters, numbers[0::3], numbers[1::3])
        if fits:
            return Grant(states)
        del self._open[claim.id]
        return _refusal(claim, states, numbers[2::3])

    def settle(self, claim: Claim, used: Amount) -> None:
        if self._open.pop(claim.id, None) is not None:
            self._ended.append((claim, used))
            self._wake.set()

    async def peek(self, meters: tuple[Meter, ...], org: str) -> tuple[State, ...]:
        keys = [_key(org, meter.name) for meter in meters]
        try:
            answer = await self._peek(keys, [self._now(), *(meter.kind.value for meter in meters)])
        except _DOWN:
            raise StoreDownError from None
        return _states(meters, answer[0::2], answer[1::2])

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(*_DOWN):  # then the leases' end settles what is left
            await self._flush()
        await self._redis.aclose()

    async def renew(self) -> None:
        """Says of all open claims that their gateway lives. Happens by itself, three times per `lease_s`."""
        ids: dict[str, list[str]] = defaultdict(list)
        for claim in self._open.values():
            ids[claim.org].append(claim.id)
        for org, members in ids.items():
            for i in range(0, len(members), _BATCH):
                await self._renew([_key(org, "leases")], [self._now(), self._lease_s, *members[i : i + _BATCH]])

    def _reserve_args(self, claim: Claim) -> tuple[list[str], list[Any]]:
        keys = [_key(claim.org, "open"), _key(claim.org, "leases"), *(_key(claim.org, m.name) for m in claim.meters)]
        args: list[Any] = [self._now(), claim.id, self._lease_s]
        for meter in claim.meters:
            args += (meter.kind.value, meter.limit, claim.cost(meter.kind))
        return keys, args

    async def _tell(self) -> None:
        """Until cancelled: tells the server what has ended."""
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
                for claim, used in batch:
                    keys = [_key(claim.org, "open"), _key(claim.org, "leases")]
                    await self._settle(keys, [claim.id, used.requests, used.tokens], client=pipe)
                await pipe.execute()
            del self._ended[: len(batch)]

    async def _stay(self) -> None:
        """Until cancelled: keeps what is open."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            with suppress(*_DOWN):
                await self.renew()

    def _now(self) -> str:
        return "" if self._clock is None else repr(self._clock())


def _key(org: str, name: str) -> str:
    return f"sluicegate:{{{org.replace('}', '%7D')}}}:{name}"


def _states(meters: tuple[Meter, ...], used: list[int], reset_ms: list[int]) -> tuple[State, ...]:
    return tuple(State(m, u, r / 1000) for m, u, r in zip(meters, used, reset_ms, strict=True))


def _refusal(claim: Claim, states: tuple[State, ...], wait_ms: list[int]) -> Refusal:
    waits = [
        float("inf") if claim.cost(s.meter.kind) > s.meter.limit else ms / 1000
        for s, ms in zip(states, wait_ms, strict=True)
    ]
    worst = max(range(len(waits)), key=waits.__getitem__)
    state, wait_s = states[worst], waits[worst]
    return Refusal(states, state, claim.cost(state.meter.kind), None if wait_s == float("inf") else wait_s)

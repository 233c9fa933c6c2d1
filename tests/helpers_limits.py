"""Limit stores as tests use them: several gateways over one count, a clock that is moved by hand, a real Redis."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from deployments.limits.actor import ActorStore, LimitCounters
from deployments.limits.base import Amount, Limit, LimitKind, LimitStore, Reservation
from deployments.limits.memory import MemoryStore
from deployments.limits.redis import RedisStore

LEASE_S = 5.0
_ids = itertools.count()


@dataclass
class Clock:
    now_s: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


def make_limit(kind: LimitKind, limit: int, level: str = "key:k") -> Limit:
    return Limit(f"{level}:{kind}", kind, limit, "organization acme")


def make_reservation(*limits: Limit, tokens: int = 0) -> Reservation:
    return Reservation(f"reservation-{next(_ids)}", "acme", limits, Amount(1, tokens))


class FakeHandle:
    """A deployment handle of `counters` without Serve. `down`: calls fail as they do when the deployment is gone.
    `deaf`: they arrive, and their answers are lost."""

    def __init__(self, counters: LimitCounters) -> None:
        self.counters = counters
        self.down = False
        self.deaf = False
        self.calls = 0

    def options(self, **_: Any) -> FakeHandle:
        return self

    def remote(self, report: Any) -> asyncio.Task[Any]:
        self.calls += 1
        return asyncio.create_task(self._call(report))

    async def _call(self, report: Any) -> Any:
        await asyncio.sleep(0)
        if self.down:
            raise TimeoutError
        answer = await self.counters.report(report)
        if self.deaf:
            raise TimeoutError
        return answer


class MortalActorStore(ActorStore):
    """One gateway's store, whose process can die."""

    def __init__(self, counters: LimitCounters, clock: Clock) -> None:
        self._handle: Any = FakeHandle(counters)
        super().__init__(self._handle, LEASE_S, clock)

    def kill(self) -> None:
        self._handle.down = True


class MortalRedisStore(RedisStore):
    """Likewise."""

    dead = False

    async def renew(self) -> None:
        if not self.dead:
            await super().renew()

    def kill(self) -> None:
        self.dead = True


@dataclass
class Bench:
    """Gateways' stores over one count."""

    clock: Clock
    make: Callable[[], LimitStore]
    stores: list[LimitStore] = field(default_factory=list)

    def gateway(self) -> LimitStore:
        self.stores.append(self.make())
        return self.stores[-1]

    async def advance(self, seconds: float, alive: tuple[LimitStore, ...] | None = None) -> None:
        """Moves the clock on. The gateways, all or those `alive`, do meanwhile what shows that they live."""
        end_s = self.clock.now_s + seconds
        while self.clock.now_s < end_s:
            for store in self.stores if alive is None else alive:
                if isinstance(store, RedisStore):
                    await store.renew()
                await store.peek((), "acme")
            self.clock.now_s = min(end_s, self.clock.now_s + LEASE_S / 2)

    @staticmethod
    def kill(store: Any) -> None:
        """Its process is gone: nothing is given back."""
        store.kill()


@asynccontextmanager
async def bench(name: str, redis_url: str) -> AsyncIterator[Bench]:
    clock = Clock()
    if name == "memory":
        only = MemoryStore(clock)
        made = Bench(clock, lambda: only)
    elif name == "actor":
        counters = LimitCounters(LEASE_S, clock)
        made = Bench(clock, lambda: MortalActorStore(counters, clock))
    else:
        made = Bench(clock, lambda: MortalRedisStore(redis_url, LEASE_S, clock))
    try:
        yield made
    finally:
        for store in made.stores:
            await store.close()


@contextmanager
def redis_server(directory: Path) -> Iterator[str]:
    """The URL of a Redis of our own, on a socket in `directory`."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("these tests need redis-server on the PATH: apt-get install redis-server")
    socket = directory / "redis.sock"
    command = [program, "--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([*command, "--dir", str(directory)], stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(unix_socket_path=str(socket)) as client:
            for _ in range(1000):
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    assert process.poll() is None
                    time.sleep(0.02)
        yield f"unix://{socket}"
    finally:
        process.kill()
        process.wait()

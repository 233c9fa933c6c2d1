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

from deployments.limits.actor import ActorStore, LimitHub
from deployments.limits.base import Amount, Claim, Kind, Meter, Store
from deployments.limits.leased import LeasedStore
from deployments.limits.memory import MemoryStore
from deployments.limits.redis import RedisStore

LEASE_S = 5.0
_ids = itertools.count()


@dataclass
class Clock:
    now_s: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


def meter(kind: Kind, limit: int, level: str = "key:k") -> Meter:
    return Meter(f"{level}:{kind}", kind, limit, "organization acme")


def claim(*meters: Meter, tokens: int = 0) -> Claim:
    return Claim(f"claim-{next(_ids)}", "acme", meters, Amount(1, tokens))


class FakeHandle:
    """A deployment handle of `hub` without Serve. `down`: calls fail as they do when the hub is gone."""

    def __init__(self, hub: LimitHub) -> None:
        self._hub = hub
        self.down = False
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
        return await self._hub.report(report)


@dataclass
class Bench:
    """Gateways' stores over one count."""

    clock: Clock
    make: Callable[[], Store]
    stores: list[Store] = field(default_factory=list)

    def gateway(self) -> Store:
        self.stores.append(self.make())
        return self.stores[-1]

    async def advance(self, seconds: float, alive: tuple[Store, ...] | None = None) -> None:
        """Moves the clock on. The gateways, all or those `alive`, do meanwhile what shows that they live."""
        end_s = self.clock.now_s + seconds
        while self.clock.now_s < end_s:
            for store in self.stores if alive is None else alive:
                if isinstance(store, RedisStore):
                    await store.renew()
                await store.peek((), "acme")
            self.clock.now_s = min(end_s, self.clock.now_s + LEASE_S / 2)

    @staticmethod
    def kill(store: Store) -> None:
        """Its process is gone: nothing is given back."""
        tasks = (
            store._tasks if isinstance(store, RedisStore) else [store._pump] if isinstance(store, LeasedStore) else []
        )
        for task in tasks:
            if task is not None:
                task.cancel()


@asynccontextmanager
async def bench(name: str, redis_url: str) -> AsyncIterator[Bench]:
    clock = Clock()
    if name == "memory":
        only = MemoryStore(clock)
        made = Bench(clock, lambda: only)
    elif name == "actor":
        handle: Any = FakeHandle(LimitHub(LEASE_S, clock))
        made = Bench(clock, lambda: ActorStore(handle, LEASE_S, clock))
    else:
        made = Bench(clock, lambda: RedisStore(redis_url, LEASE_S, clock))
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

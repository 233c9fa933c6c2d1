"""One pool of replicas as one gateway sees it, and one try at having it serve a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from grpc import RpcError  # type: ignore[import-untyped]
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.gateway.errors import ReplicaLostError
from deployments.replica_info import ReplicaInfo
from deployments.wire import SERIALIZATION, unpack
from engine.errors import EngineDeadError, EngineError, QueueFullError
from engine.types import GenerateRequest, TokenDelta

log = logging.getLogger("ray.serve")

_POLL_S = 0.5
_PATIENCE_S = 10.0  # a busy replica may take this long to say that it lives


class Pool:
    """Knows whether the pool has a replica that would take a request now, by asking all of them again and again.

    Serve itself holds a request for a pool without replicas until there is one, however long that takes; here it
    is an error at once. `on_info` is told what the replicas say of themselves whenever that changes.
    """

    def __init__(self, name: str, handle: DeploymentHandle[Any], on_info: Callable[[ReplicaInfo], None]) -> None:
        self.name = name
        self.handle = handle
        self.generate = handle.options(
            stream=True,
            method_name="generate",
            request_serialization=SERIALIZATION,
            response_serialization=SERIALIZATION,
        )
        self._on_info = on_info
        self._info: ReplicaInfo | None = None
        self._down = asyncio.Event()
        self._down.set()
        self._asking: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        return not self._down.is_set()

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await self.still_up()
            await asyncio.sleep(_POLL_S)

    async def still_up(self) -> bool:
        """Asks the replicas now. Calls at the same time share one answer."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.shield(self._asking)
        return self.up

    async def wait_down(self) -> None:
        await self._down.wait()

    async def _ask(self) -> None:
        answers: list[Any]
        try:
            call = self.handle.broadcast("describe")
            answers = await call.results_async(timeout_s=_PATIENCE_S, return_exceptions=True)
        except Exception as error:  # no replicas; nobody has answered in time; Serve is going down
            answers = [error]
        info = next((answer for answer in answers if isinstance(answer, ReplicaInfo)), None)
        if info is None:
            if self.up:
                log.warning("pool %s is down: %s", self.name, sorted({type(answer).__name__ for answer in answers}))
            self._down.set()
            return
        if info != self._info:
            self._info = info
            self._on_info(info)
        self._down.clear()


class Attempt:
    """One replica's stream of deltas: an async iterator, to be used once and then closed.

    Ends normally only after every choice has had its last delta. Raises ReplicaLostError when the replica is gone or
    going, or the whole pool is before the first deltas; QueueFullError when it has no room; other EngineErrors as the
    engine raised them. `started`: whether anything has come.
    """

    def __init__(self, pool: Pool, requests: tuple[GenerateRequest, ...]) -> None:
        self._pool = pool
        self._open_choices = sum(request.sampling.n for request in requests)
        self._stream: Any = pool.generate.remote(requests)
        self.started = False

    def close(self) -> None:
        """Aborts what still runs. Not a coroutine: nothing can cut it short."""
        self._stream.cancel()

    def __aiter__(self) -> Attempt:
        return self

    async def __anext__(self) -> list[TokenDelta]:
        try:
            deltas = await (_next(self._stream) if self.started else self._first())
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ReplicaLostError from None  # cancelled at the other end, which is not our caller's doing
        except Exception as error:
            raise self._meaning(error) from None
        if deltas is None:
            if self._open_choices > 0:
                raise ReplicaLostError
            raise StopAsyncIteration
        self.started = True
        self._open_choices -= sum(delta.finish_reason is not None for delta in deltas)
        return deltas

    async def _first(self) -> list[TokenDelta] | None:
        """Waits no longer than the pool is up: Serve would."""
        first = asyncio.create_task(_next(self._stream))
        down = asyncio.create_task(self._pool.wait_down())
        try:
            await asyncio.wait((first, down), return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                raise ReplicaLostError
            return first.result()
        finally:
            first.cancel()
            down.cancel()
            await asyncio.gather(first, down, return_exceptions=True)

    def _meaning(self, error: Exception) -> Exception:
        # Over some of Serve's transports an exception of the replica's arrives inside a RayTaskError.
        error = cause if isinstance(cause := getattr(error, "cause", None), EngineError) else error
        match error:
            case BackPressureError():
                return QueueFullError(f"pool {self._pool.name} is full")
            case RayActorError() | RpcError() | RayServeException() | EngineDeadError():
                log.warning("pool %s has lost a replica: %s", self._pool.name, type(error).__name__)
                return ReplicaLostError()
        return error


async def _next(stream: Any) -> list[TokenDelta] | None:
    packed = await anext(stream, None)
    return None if packed is None else unpack(packed)

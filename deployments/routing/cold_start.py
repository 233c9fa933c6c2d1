"""Starts the first replica of a pool that has been scaled to zero, and lets requests wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.observe.log import log
from deployments.ray_serve.handles import CALL_ERRORS
from deployments.routing.errors import ModelStartError, ModelUnavailableError, OverloadedError

_CALL_S = 2.0  # seconds that one call waits for a replica; Serve looks ten times a second whether a call waits
_LOOK_S = 0.1  # seconds between a replica's first answer and the next call, in which the pool connects to it
_LOOK_AGAIN_S = 5.0  # seconds between two looks at whether replicas still fail to start
_UNKNOWN_S = 30.0  # seconds that clients are told a start will take, until one has been seen
_OVERDUE_S = 5.0  # seconds after which clients should retry when a start takes longer than any before

Trouble = Callable[[], Awaitable[str | None]]


class ColdStart:
    """The cold starts of one pool, as one gateway causes them.

    Serve starts a replica of an empty pool when a call through its handle waits for one. One such call is kept waiting
    for all the requests that wait here. A start that has begun goes on when the last request gives up.

    `trouble` returns what Serve reports of replicas that fail to start, None when they do not. `timeout_s`: the longest
    that a request waits. `max_waiting`: how many requests may wait. `clock` gives seconds.
    """

    def __init__(
        self,
        pool: str,
        handle: DeploymentHandle[Any],
        trouble: Trouble,
        timeout_s: float,
        max_waiting: int,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._handle = handle
        self._trouble = trouble
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._over: asyncio.Future[bool] | None = None  # of the start under way: whether it went well
        self._waiting = 0
        self._began_s: float | None = None
        self._took_s: float | None = None
        self._said_s: float | None = None
        self._looked_s = 0.0
        self._answered = asyncio.Event()
        self.failing = False

    @property
    def starting(self) -> bool:
        """Whether this gateway is starting a replica."""
        return self._task is not None

    @property
    def retry_after_s(self) -> float:
        """An estimate of the seconds until the start that is under way, or would begin now, will be over."""
        took_s = max((s for s in (self._took_s, self._said_s) if s is not None), default=_UNKNOWN_S)
        left_s = took_s if self._began_s is None else took_s - (self._clock() - self._began_s)
        return left_s if left_s > 0 else _OVERDUE_S

    def begin(self) -> None:
        """Has Serve start a replica, unless that is under way."""
        if self._task is not None:
            return
        if self._began_s is None:
            self._began_s = self._clock()
        self._over = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._wake(self._over))

    async def wait(self, waited_s: float = 0.0, within_s: float | None = None) -> None:
        """Has Serve start a replica, and waits until the pool takes requests.

        `waited_s`: how many seconds the request has waited already. `within_s`: how many it may still wait by its
        deadline. Raises ModelUnavailableError when the time is over, ModelStartError when no replica can be started,
        and OverloadedError when too many requests wait.
        """
        left_s = self._timeout_s - waited_s
        left_s = left_s if within_s is None else min(left_s, within_s)
        self.begin()
        if self._waiting >= self._max_waiting:
            raise OverloadedError(self.retry_after_s)
        over = self._over
        assert over is not None
        self._waiting += 1
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                well = await asyncio.shield(over)
        except TimeoutError:
            raise ModelUnavailableError(self.retry_after_s) from None
        finally:
            self._waiting -= 1
        if not well:
            raise ModelStartError(self.retry_after_s)

    def up(self) -> None:
        """Notes that the pool takes requests, and ends the waiting."""
        self.failing = False
        if self._began_s is not None:
            self._took_s, self._began_s = self._clock() - self._began_s, None
        over, task, self._over, self._task = self._over, self._task, None, None
        if over is not None and not over.done():
            over.set_result(True)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """Gives up a start that is under way. No request may be waiting."""
        if self._task is not None:
            self._task.cancel()

    def said(self, startup_s: float) -> None:
        """Notes how long a replica's constructor took, which estimates are based on too."""
        self._said_s = startup_s

    async def answered(self, within_s: float) -> None:
        """Returns when a replica that was waited for has answered, or after `within_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._answered.wait()
        self._answered.clear()

    async def look(self) -> None:
        """Updates `failing` after a failed start, which Serve may try again. To be called regularly."""
        if self.failing and self._task is None and self._clock() - self._looked_s >= _LOOK_AGAIN_S:
            self._looked_s = self._clock()
            self.failing = await self._trouble() is not None

    async def _wake(self, over: asyncio.Future[bool]) -> None:
        """Calls again and again until the pool is up, cannot come up, or no request waits for it any more."""
        fault, noticed = None, False
        try:
            while fault is None and (self._waiting or not noticed):
                fault = await self._call()
                noticed = True
        except Exception as error:  # lest those who wait do so in vain
            fault = repr(error)
        if self._over is over:
            self._over = self._task = None
            if fault is not None:
                log.error("pool %s can't be woken: %s", self._pool, fault)
                self.failing, self._began_s, self._looked_s = True, None, self._clock()
                over.set_result(False)

    async def _call(self) -> str | None:
        """Waits up to _CALL_S for a replica. Returns why none can be started, or None."""
        call: Any = self._handle.state.remote()
        try:
            async with asyncio.timeout(_CALL_S):
                await call
        except TimeoutError:
            return await self._trouble()
        except DeploymentUnavailableError as error:
            return str(error)
        except CALL_ERRORS as error:
            log.info("pool %s: the replica that was woken does not answer: %s", self._pool, type(error).__name__)
        finally:
            call.cancel()
        self._answered.set()
        await asyncio.sleep(_LOOK_S)  # the pool connects to it meanwhile
        return None


def serve_trouble(handle: DeploymentHandle[Any]) -> Trouble:
    """A function that asks Serve's controller whether replicas of the deployment behind `handle` fail to start."""

    async def trouble() -> str | None:
        try:
            status = await asyncio.to_thread(serve.status)
        except (RayError, RayServeException) as error:  # no word is no bad word
            log.info("no status from Serve: %s", type(error).__name__)
            return None
        app = status.applications.get(handle.app_name)
        said = app.deployments.get(handle.deployment_name) if app is not None else None
        if said is None:
            return None
        failed = said.status.value == "DEPLOY_FAILED" or said.status_trigger.value == "REPLICA_STARTUP_FAILED"
        return said.message if failed else None

    return trouble

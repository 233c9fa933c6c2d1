"""The hub as a deployment of the application, and the store that reports to it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.limits.base import StoreDownError
from deployments.limits.hub import Answer, Hub, Report
from deployments.limits.leased import LeasedStore
from deployments.ray_serve.handles import CALL_ERRORS
from deployments.ray_serve.loopback import keep_on_loopback

_TIMEOUT_S = 2.0
_SERIALIZATION = "pickle"  # Serve's default would bring cloudpickle's start-up cost to each message


class LimitHub:
    """One replica, on whose event loop reports are handled one after the other. What it counts is gone when it is
    restarted: then, for once, a minute may hold up to twice a limit."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        keep_on_loopback()
        self._hub = Hub(lease_s)
        self._clock = clock

    async def report(self, report: Report) -> Answer:
        return self._hub.report(report, self._clock())


class ActorStore(LeasedStore):
    """See base.Store. `hub`: the handle of a LimitHub."""

    def __init__(self, hub: DeploymentHandle[Any], lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._hub = hub.options(
            method_name="report", request_serialization=_SERIALIZATION, response_serialization=_SERIALIZATION
        )
        super().__init__(self._report, uuid.uuid4().hex, lease_s, clock)

    async def _report(self, report: Report) -> Answer:
        call: Any = self._hub.remote(report)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer: Answer = await call
        except (TimeoutError, *CALL_ERRORS):
            raise StoreDownError from None
        finally:
            call.cancel()
        return answer

"""The shared counters as a deployment of the application, and the store that reports to it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any, Self

from ray.serve.handle import DeploymentHandle

from deployments.config.limits import LimitsConfig
from deployments.limits.base import LimitStoreDownError
from deployments.limits.leased import LeasedStore
from deployments.limits.shared_counters import GatewayReport, ReportAnswer, SharedCounters
from deployments.ray_serve.handles import CALL_ERRORS
from deployments.ray_serve.loopback import keep_on_loopback

_TIMEOUT_S = 2.0  # for one answer; it takes a few milliseconds when all is well
_SERIALIZATION = "pickle"  # Serve's default would bring cloudpickle's start-up cost to each message


class LimitCounters:
    """The deployment. It has one replica, on whose event loop reports are handled one after the other. Its counts are
    gone when it is restarted: then, for once, a minute may hold up to twice a limit."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        keep_on_loopback()
        self._counters = SharedCounters(lease_s)
        self._clock = clock

    async def report(self, report: GatewayReport) -> ReportAnswer:
        """See SharedCounters.report."""
        return self._counters.report(report, self._clock())


class ActorStore(LeasedStore):
    """A LeasedStore that reports to the deployment. `counters`: the handle of LimitCounters."""

    def __init__(
        self, counters: DeploymentHandle[Any], lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._counters = counters.options(
            method_name="report", request_serialization=_SERIALIZATION, response_serialization=_SERIALIZATION
        )
        super().__init__(self._report, uuid.uuid4().hex, lease_s, clock)

    @classmethod
    def from_config(cls, config: LimitsConfig, counters: DeploymentHandle[Any]) -> Self:
        """See ConfiguredStore."""
        return cls(counters, config.lease_s)

    async def _report(self, report: GatewayReport) -> ReportAnswer:
        call: Any = self._counters.remote(report)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer: ReportAnswer = await call
        except (TimeoutError, *CALL_ERRORS):
            raise LimitStoreDownError from None
        finally:
            call.cancel()
        return answer

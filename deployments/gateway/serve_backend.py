"""The gateway's backend on Ray Serve: plan by the router, then one streaming hop to the pool's replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from deployments.gateway.backend import ServedModel
from deployments.gateway.errors import ModelUnavailableError, ReplicaLostError
from deployments.metrics import exposition
from deployments.replica_info import ReplicaInfo
from deployments.router.plan import RoutePlan, RouteRequest
from engine.errors import EngineDeadError, EngineError
from engine.types import GenerateRequest, TokenDelta

log = logging.getLogger("ray.serve")

_POLL_S = 0.5
_POLL_TIMEOUT_S = 2.0
_RETRY_AFTER_S = 5.0  # about what a replica's restart takes


@dataclass(slots=True)
class _Pool:
    """One pool as last seen by the poll."""

    handle: DeploymentHandle[Any]
    info: ReplicaInfo | None = None
    up: bool = False


class ServeBackend:
    """See gateway.backend.Backend. One per gateway replica; lives on its event loop."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        router: DeploymentHandle[Any],
        pools: Mapping[str, DeploymentHandle[Any]],
        gateways: DeploymentHandle[Any],
    ) -> None:
        self._gateways = gateways
        self._models = dict(models)
        self._router = router
        self._pools = {name: _Pool(handle) for name, handle in pools.items()}
        self._watch = [asyncio.create_task(self._poll(name)) for name in self._pools]

    def models(self) -> Mapping[str, ServedModel]:
        return self._models

    async def ready(self) -> bool:
        return all(pool.up for pool in self._pools.values())

    async def generate(self, model_id: str, requests: tuple[GenerateRequest, ...]) -> AsyncIterator[list[TokenDelta]]:
        """Tries the plan's pools in order until one gives a first delta; after that nothing is retried."""
        plan: RoutePlan | None = await self._router.plan.remote(RouteRequest(model_id))
        for name in plan.candidates if plan else ():
            pool = self._pools[name]
            if not pool.up:
                continue
            started = False
            stream: Any = pool.handle.options(stream=True, method_name="generate").remote(requests)
            try:
                async for deltas in stream:
                    started = True
                    yield deltas
                return
            except (RayActorError, EngineDeadError) as error:
                pool.up = False
                log.warning("pool %s lost a replica: %s", name, type(error).__name__)
                if started:
                    raise ReplicaLostError from None
            except BackPressureError:
                continue
            except RayError as error:
                # The replica's own exception travels as a RayTaskError that is also an instance of its cause.
                cause = getattr(error, "cause", None)
                if isinstance(cause, EngineError):
                    raise cause from None
                raise
            finally:
                stream.cancel()
        raise ModelUnavailableError(_RETRY_AFTER_S)

    async def metrics(self) -> bytes | None:
        """Every process of the graph asked now. One that does not answer in time is left out."""
        calls = [pool.handle.broadcast("metric_families") for pool in self._pools.values()]
        calls.append(self._gateways.broadcast("metric_families"))
        answers = await asyncio.gather(
            *(c.results_async(timeout_s=_POLL_TIMEOUT_S) for c in calls), return_exceptions=True
        )
        return exposition(families for a in answers if not isinstance(a, BaseException) for families in a)

    async def _poll(self, name: str) -> None:
        """Keeps `up` true while a replica answers. A pool without replicas makes the call wait, hence the limit."""
        pool = self._pools[name]
        while True:
            try:
                info: ReplicaInfo = await asyncio.wait_for(pool.handle.describe.remote(), _POLL_TIMEOUT_S)
                if info != pool.info:
                    pool.info = info
                    self._models[name] = replace(
                        self._models[name], max_model_len=info.max_model_len, fingerprint=info.fingerprint
                    )
                pool.up = True
            except asyncio.CancelledError:
                raise
            except Exception as error:
                if pool.up:
                    log.warning("pool %s does not answer: %s", name, type(error).__name__)
                pool.up = False
            await asyncio.sleep(_POLL_S)

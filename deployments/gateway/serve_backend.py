"""The gateway's backend on Ray Serve: plan by the router, then one streaming hop to the pool's replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from grpc import RpcError  # type: ignore[import-untyped]
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.gateway.backend import ServedModel
from deployments.gateway.errors import ModelUnavailableError, ReplicaLostError
from deployments.gateway.pool import Attempt, Pool
from deployments.metrics import exposition
from deployments.replica_info import ReplicaInfo
from deployments.router.plan import RoutePlan, RouteRequest
from engine.errors import QueueFullError
from engine.types import GenerateRequest, TokenDelta

log = logging.getLogger("ray.serve")

_ATTEMPTS = 3  # replicas of one pool that may lose a request before its first token
_PLAN_TIMEOUT_S = 1.0
_METRICS_TIMEOUT_S = 2.0
_RETRY_AFTER_S = 5.0  # about what a replica's restart takes


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
        self._plans: dict[str, RoutePlan] = {}  # the last of each model
        self._valid_until: dict[str, float] = {}  # loop time
        self._pools = {name: self._pool(name, handle) for name, handle in pools.items()}
        self._watch = [asyncio.create_task(pool.watch()) for pool in self._pools.values()]
        self._watch.append(asyncio.create_task(self._first_plans()))

    def models(self) -> Mapping[str, ServedModel]:
        return self._models

    async def ready(self) -> bool:
        return self._plans.keys() >= self._models.keys() and all(pool.up for pool in self._pools.values())

    async def generate(self, model_id: str, requests: tuple[GenerateRequest, ...]) -> AsyncIterator[list[TokenDelta]]:
        """Tries the plan's pools in order, and several replicas of each, until one gives a first delta; after that
        nothing is retried."""
        plan = await self._plan(model_id)
        refusal: Exception = ModelUnavailableError(_RETRY_AFTER_S)
        for pool in (self._pools[name] for name in (plan.candidates if plan else ())):
            tried = 0
            while pool.up and tried < _ATTEMPTS:
                attempt = Attempt(pool, requests)
                try:
                    async for deltas in attempt:
                        yield deltas
                    return
                except ReplicaLostError:
                    if attempt.started:
                        raise
                    tried += 1
                    await pool.still_up()
                except QueueFullError as full:
                    refusal, tried = full, _ATTEMPTS
                finally:
                    attempt.close()
        raise refusal

    async def metrics(self) -> bytes | None:
        """Every process of the graph asked now. One that does not answer in time is left out."""
        calls = [pool.handle.broadcast("metric_families") for pool in self._pools.values()]
        calls.append(self._gateways.broadcast("metric_families"))
        answers = await asyncio.gather(
            *(c.results_async(timeout_s=_METRICS_TIMEOUT_S) for c in calls), return_exceptions=True
        )
        return exposition(families for a in answers if not isinstance(a, BaseException) for families in a)

    async def _plan(self, model_id: str) -> RoutePlan | None:
        """The router's answer, which may still be a valid earlier one. While it has none, the last one it gave for
        this model; None if there is none."""
        now = asyncio.get_running_loop().time()
        if now < self._valid_until.get(model_id, 0.0):
            return self._plans[model_id]
        call: Any = self._router.plan.remote(RouteRequest(model_id))
        try:
            plan: RoutePlan | None = await asyncio.wait_for(call, _PLAN_TIMEOUT_S)
        except (TimeoutError, RayError, RayServeException, RpcError) as error:
            log.warning("no plan for %s from the router: %s", model_id, type(error).__name__)
            return self._plans.get(model_id)
        finally:
            call.cancel()
        if plan is not None:
            self._plans[model_id] = plan
            self._valid_until[model_id] = now + plan.valid_s
        return plan

    async def _first_plans(self) -> None:
        for model_id in self._models:
            while await self._plan(model_id) is None:
                await asyncio.sleep(0.1)

    def _pool(self, name: str, handle: DeploymentHandle[Any]) -> Pool:
        def learn(info: ReplicaInfo) -> None:
            self._models[name] = replace(
                self._models[name], max_model_len=info.max_model_len, fingerprint=info.fingerprint
            )

        return Pool(name, handle, learn)

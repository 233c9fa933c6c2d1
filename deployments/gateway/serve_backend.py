"""The gateway's backend on Ray Serve: plan by the router, then a stream from one of the pool's replicas."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from grpc import RpcError  # type: ignore[import-untyped]
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.channel.errors import StreamLostError
from deployments.gateway.backend import ServedModel
from deployments.gateway.errors import ModelUnavailableError, ReplicaLostError
from deployments.gateway.pool import Pool
from deployments.metrics import exposition
from deployments.replica_info import ReplicaInfo
from deployments.router.plan import RoutePlan, RouteRequest
from deployments.router.policies import POLICIES
from deployments.router.policies.base import RouteHint
from engine.errors import EngineDeadError, QueueFullError
from engine.types import GenerateRequest, TokenDelta

log = logging.getLogger("ray.serve")

_ATTEMPTS = 3  # replicas of one pool that may lose a request before its first token
_PLAN_TIMEOUT_S = 1.0
_STALE = 10.0  # times its validity: how long a plan may serve while the next is being asked for
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
        policies: Mapping[str, str],
    ) -> None:
        """`policies`: pool -> how it chooses a replica, a name in POLICIES."""
        self._gateways = gateways
        self._models = dict(models)
        self._router = router
        self._plans: dict[str, RoutePlan] = {}  # the last of each model
        self._valid_until: dict[str, float] = {}  # loop time
        self._asking: dict[str, asyncio.Task[RoutePlan | None]] = {}
        self._pools = {name: self._pool(name, handle, policies[name]) for name, handle in pools.items()}
        self._watch = [asyncio.create_task(pool.watch()) for pool in self._pools.values()]
        self._watch.append(asyncio.create_task(self._first_plans()))

    def models(self) -> Mapping[str, ServedModel]:
        return self._models

    async def ready(self) -> bool:
        return self._plans.keys() >= self._models.keys() and all(pool.up for pool in self._pools.values())

    async def generate(
        self, model_id: str, requests: tuple[GenerateRequest, ...], streamed: bool
    ) -> AsyncIterator[list[TokenDelta]]:
        """Tries the plan's pools in order, and several replicas of each, until one gives a first delta; after that
        nothing is retried."""
        plan = await self._plan(model_id)
        hint = RouteHint(sum(len(request.prompt) for request in requests))
        refusal: Exception = ModelUnavailableError(_RETRY_AFTER_S)
        for pool in (self._pools[name] for name in (plan.candidates if plan else ())):
            tried: set[str] = set()
            while len(tried) < _ATTEMPTS and (replica := pool.choose(hint, tried)) is not None:
                tried.add(replica.address.replica_id)
                stream = replica.open(requests, streamed)
                try:
                    async for deltas in stream:
                        yield deltas
                    return
                except (StreamLostError, EngineDeadError) as error:
                    log.warning("pool %s has lost a replica: %s", pool.name, error)
                    if stream.started:
                        raise ReplicaLostError from None
                except QueueFullError as full:
                    refusal = full
                finally:
                    stream.close()
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
        """The router's answer for this model. One that is no longer valid, but not for long, still serves while the
        next is asked for; while the router has none, so does the last one it gave. None: there has never been one."""
        now = asyncio.get_running_loop().time()
        plan = self._plans.get(model_id)
        expired_s = now - self._valid_until.get(model_id, 0.0)
        if plan is not None and expired_s <= 0:
            return plan
        asking = self._asking.get(model_id)
        if asking is None or asking.done():
            asking = self._asking[model_id] = asyncio.create_task(self._ask_plan(model_id))
        if plan is not None and expired_s <= _STALE * plan.valid_s:
            return plan
        return await asyncio.shield(asking)

    async def _ask_plan(self, model_id: str) -> RoutePlan | None:
        now = asyncio.get_running_loop().time()
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

    def _pool(self, name: str, handle: DeploymentHandle[Any], policy: str) -> Pool:
        def learn(info: ReplicaInfo) -> None:
            self._models[name] = replace(
                self._models[name], max_model_len=info.max_model_len, fingerprint=info.fingerprint
            )

        return Pool(name, handle, POLICIES.get(policy)(), learn, random.Random())

"""The gateway as a Serve ingress: builds the ASGI app over the handles it was bound with."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric
from ray import get_runtime_context, serve
from ray.serve.handle import DeploymentHandle

from deployments.api.rate_limiter import RateLimiter
from deployments.config.application import ModelConfig
from deployments.config.gateway import GatewayConfig
from deployments.config.sampling_defaults import sampling_defaults
from deployments.config.upstream import UpstreamConfig
from deployments.gateway.app import create_app
from deployments.limits.build import build_store
from deployments.limits.memory import MemoryStore
from deployments.observe.access_log import AccessLog
from deployments.observe.request_log import RequestLog
from deployments.observe.telemetry import GatewayTelemetry
from deployments.ray_serve import private, way_in
from deployments.ray_serve.loopback import keep_on_loopback
from deployments.routing.serve_backend import GraphHandles, Location, ServeBackend
from deployments.routing.served_model import ServedModel
from engine.models.locate import resolve
from engine.text import load_text

_ACQUAINT_S = 5.0  # before the first request, for what is there already
_ZONE, _REGION = "ray.io/availability-zone", "ray.io/region"  # labels that Ray gives its nodes, or their owner does


class Gateway:
    """Knows models, keys and the OpenAI API; holds no model."""

    def __init__(
        self,
        config: GatewayConfig,
        models: Sequence[ModelConfig],
        router: DeploymentHandle[Any],
        pools: Mapping[str, DeploymentHandle[Any]],
        gateways: int,
        limit_counters: DeploymentHandle[Any] | None,
        upstreams: Sequence[UpstreamConfig],
    ) -> None:
        """`gateways`: how many there are. `limit_counters`: of LimitCounters; None where it is not needed."""
        keep_on_loopback()
        self._config = config
        self._models = models
        self._router = router
        self._pools = pools
        self._num_gateways = gateways
        self._limit_counters = limit_counters
        self._upstreams = upstreams
        private.log_switch_faults("gateway")
        replica = serve.get_replica_context().replica_id.unique_id
        self._telemetry = GatewayTelemetry(replica, way_in.kind(os.environ))
        self._access_log = AccessLog(private.logs_dir(), replica)

    async def __serve_build_asgi_app__(self) -> Any:
        created = int(time.time())
        loading = [
            *(asyncio.to_thread(_of_pool, model, created) for model in self._models),
            *(asyncio.to_thread(_of_upstream, upstream, created) for upstream in self._upstreams if upstream.tokenizer),
        ]
        served = {model.id: model for model in await asyncio.gather(*loading)}
        here = serve.get_replica_context()
        gateways = serve.get_deployment_handle(here.deployment, app_name=here.app_name)
        labels: Mapping[str, Any] = get_runtime_context().get_node_labels()
        backend = ServeBackend(
            served,
            self._models,
            self._upstreams,
            GraphHandles(self._router, self._pools, gateways),
            Location(str(labels.get(_ZONE, "")), str(labels.get(_REGION, ""))),
            self._telemetry.usable,
        )
        await backend.acquaint(_ACQUAINT_S)
        return create_app(self._config, backend, self._finished, self._limiter())

    def _limiter(self) -> RateLimiter:
        config = self._config
        counters = self._limit_counters
        store = build_store(config.limits, self._num_gateways, counters) if config.has_limits else MemoryStore()
        return RateLimiter(config, store, self._telemetry.verdict, self._telemetry.settled)

    async def metric_families(self) -> list[Metric]:
        """A snapshot of this gateway's metrics, for whichever gateway answers /metrics."""
        return self._telemetry.families()

    def _finished(self, record: RequestLog) -> None:
        self._telemetry.finished(record)
        self._access_log.write(record)


def _of_pool(config: ModelConfig, created: int) -> ServedModel:
    """Raises EngineError for files that cannot be used."""
    text = load_text(str(resolve(config.engine.model)), config.engine.tokenizer)
    return ServedModel(config.name, created, "sluicegate", 0, text, sampling_defaults(config))


def _of_upstream(config: UpstreamConfig, created: int) -> ServedModel:
    """As clients see an upstream that can stand alone. It has sampling defaults of its own."""
    assert config.tokenizer is not None
    text = load_text(str(resolve(config.tokenizer)))
    return ServedModel(config.name, created, config.name, config.max_model_len or 0, text)

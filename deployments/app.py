"""build(): the only place that binds the deployment graph.

No `from __future__ import annotations` here: Serve validates `args:` against the builder's annotation only
when that is a class, not a string.
"""

import re
from typing import Any

from ray import serve
from ray.serve import Application

from deployments.config.application import ModelConfig, ServeConfig
from deployments.config.secrets import refuse_written_secrets
from deployments.gateway.deployment import Gateway
from deployments.limits.actor import LimitCounters
from deployments.ray_serve import private
from deployments.ray_serve.flags import replica_env
from deployments.replica.deployment import ModelReplica
from deployments.replica.pins import Pin, pins_of
from deployments.routing.router import ModelRouter

HEALTH_TIMEOUT_S = 10.0
"""Seconds that a replica may take to answer Serve's health check. Serve ends one that fails three times in a row."""


def build(config: ServeConfig) -> Application:
    """Gateway -> one ModelReplica deployment per pool, by the table that ModelRouter keeps. Where limits are counted by
    the store `actor`, all gateways also share a LimitCounters. Raises PermissionError on a Ray cluster that lets
    everybody run code, unless the configuration allows that, and ValueError for secrets that are written out in the
    config of a server that others can reach."""
    if not config.allow_unauthenticated_ray and (faults := private.token_faults()):
        raise PermissionError("; ".join(faults))
    if (host := private.http_host()) is not None:
        refuse_written_secrets(config.gateway.model_dump(), host)
    pools = {
        model.name: _pool(model, pins_of(model.pinned_prompts, config.gateway), config.budget_terms(model))
        for model in config.models
    }
    upstreams = tuple(upstream.name for upstream in config.upstreams)
    router = _light(ModelRouter, num_replicas=1, user_config={}).bind(
        tuple(pools), upstreams, config.tier_priorities, config.standalone_upstreams
    )
    gateway = _light(serve.ingress()(Gateway), num_replicas=config.gateway_replicas)
    limits = config.gateway.limits
    counted = config.gateway.has_limits and limits.store == "actor"
    limit_counters = _light(LimitCounters, num_replicas=1).bind(limits.lease_s) if counted else None
    application: Application = gateway.bind(
        config.gateway, config.models, router, pools, config.gateway_replicas, limit_counters, config.upstreams
    )
    return application


def _light(cls: Any, num_replicas: int, **options: Any) -> Any:
    """A deployment that only awaits: many requests at once, hardly any CPU reserved."""
    deployment: Any = serve.deployment(cls)
    return deployment.options(
        name=cls.__name__,
        num_replicas=num_replicas,
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=1,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=600,
        graceful_shutdown_wait_loop_s=0.2,
        **options,
    )


def _pool(model: ModelConfig, pins: tuple[Pin, ...], budget: dict[str, Any] | None) -> Any:
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", model.name)
    deployment: Any = serve.deployment(ModelReplica)
    scaling = model.autoscaling
    replicas: dict[str, Any] = (
        {"num_replicas": model.replicas}
        if scaling is None
        else {"autoscaling_config": scaling.for_serve(model.name, model.replicas, budget)}
    )
    return deployment.options(
        name=f"ModelReplica-{slug}",
        **replicas,
        max_ongoing_requests=model.max_ongoing_requests,
        ray_actor_options={
            "num_cpus": model.num_cpus,
            "num_gpus": model.gpus_per_replica,
            "runtime_env": {"env_vars": replica_env()},
        },
        health_check_period_s=model.health_check_period_s,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=model.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.2,
    ).bind(model, pins)

"""The store that the settings ask for."""

from __future__ import annotations

from typing import Any

from deployments.config.limits import LimitsConfig
from deployments.limits.actor import ActorStore
from deployments.limits.base import LimitStore
from deployments.limits.memory import MemoryStore
from deployments.limits.outage import OutageGuard


def build_store(config: LimitsConfig, gateways: int, counters: Any) -> LimitStore:
    """`gateways`: how many share the store. `counters`: the handle of the deployment LimitCounters, where the store is
    `actor`. Raises ValueError for an environment variable that is not set."""
    store: LimitStore
    match config.store:
        case "memory":
            return MemoryStore()
        case "actor":
            store = ActorStore(counters, config.lease_s)
        case _:
            from deployments.limits.redis import RedisStore  # a tenth of a second's import that most do without

            store = RedisStore(config.resolved_redis_url(), config.lease_s)
    return OutageGuard(store, gateways if config.on_store_failure == "local" else None)

"""From settings to a store."""

from __future__ import annotations

from typing import Any

from deployments.config.limits import LimitsConfig
from deployments.limits.base import Store
from deployments.limits.outage import Guarded


def build_store(config: LimitsConfig, gateways: int, hub: Any) -> Store:
    """`hub`: the handle of a LimitHub, where the store is `actor`. Raises ValueError for an unset variable."""
    store: Store
    if config.store == "memory":
        from deployments.limits.memory import MemoryStore

        return MemoryStore()
    if config.store == "actor":
        from deployments.limits.actor import ActorStore

        store = ActorStore(hub, config.lease_s)
    else:
        from deployments.limits.redis import RedisStore

        store = RedisStore(config.resolved_redis_url(), config.lease_s)
    return Guarded(store, gateways if config.on_store_failure == "local" else None)

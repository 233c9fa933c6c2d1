"""The store that the settings ask for."""

from __future__ import annotations

from typing import Any

from deployments.config.limits import STORES, LimitsConfig
from deployments.limits.base import ConfiguredStore, LimitStore
from deployments.limits.memory import MemoryStore
from deployments.limits.outage import OutageGuard


def build_store(config: LimitsConfig, gateways: int, counters: Any) -> LimitStore:
    """`gateways`: how many share the store. `counters`: the handle of the deployment LimitCounters, where the store is
    `actor`. Raises ValueError for an environment variable that is not set."""
    kind: type[ConfiguredStore] = STORES.get(config.store)
    store = kind.from_config(config, counters)
    if isinstance(store, MemoryStore):  # never out of reach
        return store
    return OutageGuard(store, gateways if config.on_store_failure == "local" else None)

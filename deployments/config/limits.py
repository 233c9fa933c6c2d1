"""Settings of the limits that do not belong to a tier, and of where counts are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from deployments.config.environment import from_environment
from deployments.config.strict import StrictModel
from deployments.config.tiers import Allowance
from engine.registry import Registry

STORES: Registry[Any] = Registry(
    "limit store",
    {
        "memory": "deployments.limits.memory:MemoryStore",
        "actor": "deployments.limits.actor:ActorStore",
        "redis": "deployments.limits.redis:RedisStore",
    },
)
"""By the names for the setting `store`. The gateway imports the one that it uses."""


class LimitsConfig(StrictModel):
    """Limits beyond those of tiers, and where the counts of all limits are kept."""

    store: str = "actor"
    """Where counts are kept. `actor`: in one Ray actor that all gateways share. `redis`: in a Redis server, also for
    several clusters. `memory`: in the gateway's process, which is exact for one gateway only."""
    redis_url: str | None = Field(None, repr=False)
    """The URL of the Redis server, or `env:NAME`, which one with a password needs unless the server is on the loopback
    address. Needed by `store: redis`."""
    lease_s: float = Field(5.0, ge=1.0)
    """Seconds after which what a killed gateway held is free again."""
    on_store_failure: Literal["refuse", "local"] = "refuse"
    """What happens while the store cannot be reached. `refuse`: requests that have limits get status 503. `local`:
    each gateway counts alone, with its share of each limit."""
    orgs: Mapping[str, Allowance] = {}
    """Organisation to its limits. They hold for each model apart."""
    projects: Mapping[str, Allowance] = {}
    """ORG/PROJECT to the limits of the project as a whole."""

    @field_validator("store")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in STORES.names():
            raise ValueError(f"must be one of {', '.join(STORES.names())}, got {value!r}")
        return value

    @field_validator("projects")
    @classmethod
    def _of_an_org(cls, value: Mapping[str, Allowance]) -> Mapping[str, Allowance]:
        for name in value:
            org, slash, project = name.partition("/")
            if not (org and slash and project):
                raise ValueError(f"must have keys of the form ORG/PROJECT, got {name!r}")
        return value

    @model_validator(mode="after")
    def _has_url(self) -> Self:
        if self.store == "redis" and not self.redis_url:
            raise ValueError("redis_url is missing; store redis needs it")
        return self

    def resolved_redis_url(self) -> str:
        """Raises ValueError for an unset variable."""
        return from_environment(self.redis_url or "", "the Redis URL's")

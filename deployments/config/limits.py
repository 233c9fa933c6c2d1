"""Settings of the limits that do not belong to a tier, and of where counts are kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deployments.config.tiers import Allowance
from deployments.limits.base import STORES


class LimitsConfig(BaseModel):
    """`store`: where counts are kept. `memory` is exact for one gateway replica only. `redis_url` is for `redis`: the
    URL or `env:NAME`. `lease_s`: after which what a killed gateway held is free again. `on_store_failure`: while the
    store is out of reach, `refuse` every request that has limits, or count them per gateway (`local`), each with its
    share. `orgs`: limits of an organisation, for each model apart. `projects`: of a project as a whole, by
    ORG/PROJECT."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str = "actor"
    redis_url: str | None = Field(None, repr=False)
    lease_s: float = Field(5.0, ge=1.0)
    on_store_failure: Literal["refuse", "local"] = "refuse"
    orgs: Mapping[str, Allowance] = {}
    projects: Mapping[str, Allowance] = {}

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
        url = self.redis_url or ""
        if not url.startswith("env:"):
            return url
        name = url.removeprefix("env:")
        if not (value := os.environ.get(name, "").strip()):
            raise ValueError(f"the Redis URL's environment variable {name!r} is not set")
        return value

"""Tiers: what a key's class of service may do. Plain settings; None is no limit."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_TIER = "default"  # of keys that name none


class Allowance(BaseModel):
    """Requests and tokens per minute, and requests at once. Tokens are prompt plus `max_tokens` when a request comes,
    and what it really took when it has ended."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rpm: int | None = Field(None, ge=1)
    tpm: int | None = Field(None, ge=1)
    max_concurrent: int | None = Field(None, ge=1)


class Tier(Allowance):
    """The allowance holds for each key of the tier. `priority`: smaller is more important; a request can only make
    itself less important. `max_tokens`: of one answer. `max_context`: of prompt and answer together. `models`: others
    do not exist for these keys. `ttft_slo_ms`: the time to the first token that is aimed at. `batch_quota`: tokens
    that may be queued in batch jobs."""

    priority: int = 0
    max_tokens: int | None = Field(None, ge=1)
    max_context: int | None = Field(None, ge=2)
    models: tuple[str, ...] | None = None
    ttft_slo_ms: float | None = Field(None, gt=0)
    batch_quota: int | None = Field(None, ge=0)

    @property
    def model_names(self) -> frozenset[str] | None:
        return None if self.models is None else frozenset(self.models)


UNLIMITED = Tier()


def resolve(tiers: Mapping[str, Tier], default: str | None, name: str) -> tuple[str, Tier] | None:
    """The tier that a key which names `name` has, under its own name. None: there are tiers, but not that one."""
    if not tiers:
        return DEFAULT_TIER, UNLIMITED
    if name not in tiers and name == DEFAULT_TIER and default is not None:
        name = default
    tier = tiers.get(name)
    return None if tier is None else (name, tier)

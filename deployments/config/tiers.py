"""Tiers: what a key's class of service may do. Plain settings; None is no limit."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from deployments.config.strict import StrictModel

DEFAULT_TIER = "default"  # of keys that name none


class Allowance(StrictModel):
    """How much is allowed. null is no limit."""

    rpm: int | None = Field(None, ge=1)
    """HTTP requests per minute, as OpenAI counts them: no 60 seconds hold more."""
    tpm: int | None = Field(None, ge=1)
    """Tokens per minute. A request counts with its prompt and its longest answer (`max_tokens`) when it comes, and
    with what it really used when it has ended."""
    max_concurrent: int | None = Field(None, ge=1)
    """Sequences that run at the same time. A request counts with its choices: its prompts times `n`."""


class Tier(Allowance):
    """A class of service. Its allowance holds for each key of the tier apart."""

    priority: int = 0
    """The priority of its requests: smaller is more important. A request can only make itself less important."""
    max_tokens: int | None = Field(None, ge=1)
    """The most tokens of one answer."""
    max_context: int | None = Field(None, ge=2)
    """The most tokens of prompt and answer together."""
    models: tuple[str, ...] | None = None
    """The model ids that its keys see. By default all."""
    batch_quota: int | None = Field(None, ge=0)
    """Reserved for batch jobs, which do not exist yet: tokens that may be queued in them. It has no effect today."""

    @property
    def model_names(self) -> frozenset[str] | None:
        """The models as a set; None: all."""
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

"""How models are routed: what stands under `user_config` of the deployment ModelRouter in a Serve config file.

Serve hands a changed `user_config` to the running router, so that routes change without a restart. All names are
optional: without any, every pool is served under its own name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import Annotated, Self

from pydantic import Field, model_validator

from deployments.config.failures import Failure
from deployments.config.routing_table import Limits, Route, RoutingTable, Shadow, Share, Target, TierRule
from deployments.config.strict import StrictModel

Weight = Annotated[float, Field(ge=0, le=1e6)]
Percent = Annotated[float, Field(gt=0, le=100)]
OWN_ABILITIES = frozenset({"logprobs", "echo", "tools", "json", "token_ids"})  # of our own pools, unless they say
_UPSTREAM_ABILITIES = frozenset({"tools", "token_ids"})  # the answers to others are not passed on


class RouteConfig(StrictModel):
    """How the requests for one model id are served."""

    pools: dict[str, Weight]
    """Pool to its weight: 90 and 10 make a canary of 10 %. A list stands for equal weights. Upstreams with a tokenizer
    of their own may be among them."""
    fallbacks: tuple[str, ...] = ()
    """Pools and upstreams that are asked, in this order, when those fail."""
    shadows: Mapping[str, Percent] = {}
    """Pool to a percentage of the requests of which it gets a copy. Its answers are dropped."""
    retry_on: frozenset[Failure] = frozenset(Failure)
    """The failures after which the next pool is asked: `timeout` (no first token in time), `error` (the server failed
    or is gone), `overloaded` (no room now), `context` (the prompt is too long for this pool)."""
    deadline_s: float | None = Field(None, gt=0)
    """Seconds for the whole answer. By default there is no such limit."""
    first_token_s: float | None = Field(None, gt=0)
    """Seconds for the first token of each attempt. By default there is no such limit."""
    hedge_after_s: float | None = Field(None, gt=0)
    """Seconds without a first token after which a second attempt runs beside the first. By default there is none."""
    max_resumptions: int = Field(2, ge=0)
    """How often one answer may go on elsewhere after its replica was lost."""
    resume_within_s: float = Field(30.0, ge=0)
    """Seconds that such an answer waits for a replica that can go on with it."""

    @model_validator(mode="before")
    @classmethod
    def _equals(cls, value: object) -> object:
        if isinstance(value, dict) and isinstance(pools := value.get("pools"), (list, tuple)):
            return {**value, "pools": dict.fromkeys(pools, 1.0)}
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not any(weight > 0 for weight in self.pools.values()):
            raise ValueError("pools must name at least one pool with a weight above 0")
        return self


class TargetConfig(StrictModel):
    """What routing knows of one pool or upstream."""

    zone: str = ""
    """The availability zone it is in. A gateway prefers its own, which it reads from the label
    `ray.io/availability-zone` of its Ray node."""
    region: str = ""
    """The region it is in. Likewise, after the zone (label `ray.io/region`)."""
    max_tokens: int | None = Field(None, ge=1)
    """Its context class: the most tokens of prompt and answer together that it is meant for. Requests go to the
    smallest class that they fit in. By default it is meant for all that it can take."""
    abilities: frozenset[str] | None = None
    """What it can do beyond text: `logprobs`, `echo`, `tools`, `json`, `token_ids`. By default a pool can do all of it
    and an upstream nothing; an upstream may have `tools`, as long as it answers in text, and `token_ids`."""


class TierConfig(StrictModel):
    """What requests of one tier may use."""

    pools: frozenset[str] | None = None
    """Pools and upstreams that the tier may use. By default all."""
    queue_share: float | None = Field(None, gt=0, le=1)
    """The share of a pool's `max_queue_s` that may be in use when a request of the tier comes; beyond it the request is
    refused. By default equal steps down from 1 in the order of the tiers' priorities."""


class RoutingConfig(StrictModel):
    """The `user_config` of the deployment ModelRouter. It can change without a restart. A pool that no route names is
    served under its own name, and so is an upstream with a tokenizer of its own."""

    routes: Mapping[str, RouteConfig] = {}
    """Model id to how it is served."""
    targets: Mapping[str, TargetConfig] = {}
    """Pool or upstream to what is to be known of it."""
    tiers: Mapping[str, TierConfig] = {}
    """Tier of `gateway.tiers` to what its requests may use."""


def compiled(
    config: RoutingConfig,
    pools: Collection[str],
    upstreams: Collection[str],
    tiers: Mapping[str, int],
    standalone: Collection[str] = (),
) -> RoutingTable:
    """The table for these pools and upstreams. `tiers`: their priorities. `standalone`: the upstreams that can serve
    what no pool serves. Raises ValueError that names the setting at fault."""
    _check_names(config, pools, upstreams, tiers, standalone)
    named = {name for r in config.routes.values() for name in (*r.pools, *r.fallbacks, *r.shadows)}
    routes = {name: Route(name, (Share(name),)) for name in (*pools, *standalone) if name not in named}
    routes |= {model: _route(model, route) for model, route in config.routes.items()}
    targets = {
        name: _target(name, name in upstreams, config.targets.get(name, TargetConfig()))
        for name in (*pools, *upstreams)
    }
    rules = {
        name: TierRule(own.pools, own.queue_share if own.queue_share is not None else share)
        for name, share in _queue_shares(tiers).items()
        for own in [config.tiers.get(name, TierConfig())]
    }
    said = (config.model_dump_json(), sorted(pools), sorted(upstreams), sorted(tiers.items()), sorted(standalone))
    return RoutingTable(targets, routes, rules, blake2b(repr(said).encode(), digest_size=8).hexdigest())


def _target(name: str, external: bool, config: TargetConfig) -> Target:
    abilities = config.abilities
    if abilities is None:
        abilities = frozenset() if external else OWN_ABILITIES
    return Target(name, external, config.zone, config.region, config.max_tokens, None, abilities)


def _route(model: str, config: RouteConfig) -> Route:
    limits = Limits(
        config.deadline_s,
        config.first_token_s,
        config.hedge_after_s,
        config.max_resumptions,
        config.retry_on,
        config.resume_within_s,
    )
    return Route(
        model,
        tuple(Share(name, weight) for name, weight in config.pools.items()),
        config.fallbacks,
        tuple(Shadow(name, percent / 100) for name, percent in config.shadows.items()),
        limits,
    )


def _queue_shares(tiers: Mapping[str, int]) -> dict[str, float]:
    """Equal steps down from 1 for the most important tier; tiers of the same priority are on the same step."""
    ranks = {priority: rank for rank, priority in enumerate(sorted(set(tiers.values())))}
    return {name: 1.0 - ranks[priority] / len(ranks) for name, priority in tiers.items()}


def _check_names(
    config: RoutingConfig,
    pools: Collection[str],
    upstreams: Collection[str],
    tiers: Mapping[str, int],
    standalone: Collection[str],
) -> None:
    for model, route in config.routes.items():
        for field, names, known in (
            ("pools", route.pools, (*pools, *standalone)),
            ("fallbacks", route.fallbacks, (*pools, *upstreams)),
            ("shadows", route.shadows, pools),
        ):
            _check_known(f"routes.{model}.{field}", names, known)
    _check_known("targets", config.targets, (*pools, *upstreams))
    for name, target in config.targets.items():
        able = _UPSTREAM_ABILITIES if name in upstreams else OWN_ABILITIES
        _check_known(f"targets.{name}.abilities", target.abilities or (), able)
    _check_known("tiers", config.tiers, tiers)
    for name, tier in config.tiers.items():
        _check_known(f"tiers.{name}.pools", tier.pools or (), (*pools, *upstreams))


def _check_known(where: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: unknown name {name!r}; known: {', '.join(sorted(known)) or 'none'}")

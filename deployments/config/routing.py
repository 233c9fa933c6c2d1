"""How models are routed: what stands under `user_config` of the deployment ModelRouter in a Serve config file.

Serve hands a changed `user_config` to the running router, so that routes change without a restart. All names are
optional: without any, every pool is served under its own name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deployments.routing.failures import Failure
from deployments.routing.table import Limits, Route, RoutingTable, Shadow, Share, Target, TierRule

Weight = Annotated[float, Field(ge=0, le=1e6)]
Percent = Annotated[float, Field(gt=0, le=100)]
OWN_ABILITIES = frozenset({"logprobs", "echo", "tools", "json", "token_ids"})  # of our own pools, unless they say


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RouteConfig(_Strict):
    """One model id. `pools`: names with weights (90 and 10 make a canary of 10 %), or a list of equals; upstreams that
    can stand alone may be among them. `fallbacks`:
    pools and upstreams to ask when those fail. `shadows`: pools that get a copy of so many per cent of the requests,
    whose answers are dropped. The rest: see table.Limits."""

    pools: dict[str, Weight]
    fallbacks: tuple[str, ...] = ()
    shadows: dict[str, Percent] = {}
    retry_on: frozenset[Failure] = frozenset(Failure)
    deadline_s: float | None = Field(None, gt=0)
    first_token_s: float | None = Field(None, gt=0)
    hedge_after_s: float | None = Field(None, gt=0)
    max_resumptions: int = Field(2, ge=0)
    resume_within_s: float = Field(30.0, ge=0)

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


class TargetConfig(_Strict):
    """What is to be known of a pool or an upstream: see table.Target. `abilities`: of `logprobs`, `echo`, `tools`,
    `json` and `token_ids`; by default a pool has them all and an upstream none."""

    zone: str = ""
    region: str = ""
    max_tokens: int | None = Field(None, ge=1)
    abilities: frozenset[str] | None = None


class TierConfig(_Strict):
    """`pools`: the pools and upstreams that the tier may use, all by default. `queue_share`: see table.TierRule; by
    default it follows the order of the tiers' priorities."""

    pools: frozenset[str] | None = None
    queue_share: float | None = Field(None, gt=0, le=1)


class RoutingConfig(_Strict):
    """A pool that no route names is served under its own name, and so is an upstream that can stand alone."""

    routes: dict[str, RouteConfig] = {}
    targets: dict[str, TargetConfig] = {}
    tiers: dict[str, TierConfig] = {}


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
    _check_known("tiers", config.tiers, tiers)
    for name, tier in config.tiers.items():
        _check_known(f"tiers.{name}.pools", tier.pools or (), (*pools, *upstreams))


def _check_known(where: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: unknown name {name!r}; known: {', '.join(sorted(known)) or 'none'}")

"""What a config file says of routing: the `user_config` of ModelRouter, checked against the application's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from deployments.config.application import ServeConfig
from deployments.config.problems import Path, Problem, unknown_keys, wrong_values
from deployments.config.routing import RoutingConfig, compiled
from deployments.config.routing_table import RoutingTable

ROUTER = "ModelRouter"


def user_config(app: Mapping[str, Any]) -> tuple[Path, Any]:
    """Where in the application the router's configuration stands, and what it is; {} when there is none."""
    deployments = app.get("deployments")
    for index, deployment in enumerate(deployments if isinstance(deployments, list) else ()):
        if isinstance(deployment, dict) and deployment.get("name") == ROUTER:
            return ("deployments", index, "user_config"), deployment.get("user_config") or {}
    return (), {}


def table_of(app: Mapping[str, Any], config: ServeConfig) -> RoutingTable:
    """The table that the application's router will have. Raises ValueError."""
    routing = RoutingConfig.model_validate(user_config(app)[1])
    return compiled(
        routing,
        [model.name for model in config.models],
        [u.name for u in config.upstreams],
        config.tier_priorities,
        config.standalone_upstreams,
    )


def routing_problems(app: Mapping[str, Any], at: Path) -> Iterator[Problem]:
    """Everything wrong with it; nothing while the application's arguments are not valid themselves."""
    where, value = user_config(app)
    found = [Problem((*at, *where, *p.path), p.message) for p in unknown_keys(value, RoutingConfig)]
    yield from found
    try:
        config = ServeConfig.model_validate(app.get("args"))
    except ValidationError:
        return
    if found:
        return
    try:
        table = table_of(app, config)
    except ValidationError as error:
        yield from wrong_values(error, (*at, *where))
    except ValueError as error:
        yield Problem((*at, *where), str(error))
    else:
        yield from _tier_problems(config, table, at)


def _tier_problems(config: ServeConfig, table: RoutingTable, at: Path) -> Iterator[Problem]:
    for name, tier in config.gateway.tiers.items():
        for model in sorted(set(tier.models or ()) - set(table.routes)):
            where = (*at, "args", "gateway", "tiers", name, "models")
            yield Problem(where, f"{model!r} is not served; served: {', '.join(table.routes)}")

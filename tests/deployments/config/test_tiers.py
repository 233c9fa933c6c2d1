"""Tiers and limits in config files: what is found wrong, by name, and which tier a key has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.config.application import ServeConfig
from deployments.config.limits import LimitsConfig
from deployments.config.serve_file import override, problems, read_config
from deployments.config.tiers import UNLIMITED, Tier, resolve

FILE = str(Path(__file__).parents[3] / "cluster_configs" / "tiers.yaml")
GATEWAY = "applications[0].args.gateway"


def raw(*changes: str) -> dict[str, Any]:
    value = read_config(FILE)
    for change in changes:
        override(value, change)
    return value


def gateway_of(value: dict[str, Any]) -> Any:
    return ServeConfig.model_validate(value["applications"][0]["args"]).gateway


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["gateway.tiers.free.rpmm=3"], ".tiers.free.rpmm: unknown key; did you mean rpm?"),
        (["gateway.tiers.free.rpm=0"], ".tiers.free.rpm: must be greater than or equal to 1, got 0"),
        (["gateway.tiers.pro.max_concurrent=1.5"], ".tiers.pro.max_concurrent: must be an integer, got 1.5"),
        (["gateway.tiers.free.models=3"], ".tiers.free.models: must be a list, got 3"),
        (
            ["gateway.tiers.free.models=[x]"],
            ".tiers.free.models: 'x' is not served; served: smollm2-135m",
        ),
        (["gateway.default_tier=gold"], ".default_tier: must name one of the tiers free, pro, admin, which keys"),
        (["gateway.default_tier=null"], ".default_tier: must name one of the tiers free, pro, admin, which keys"),
        (["gateway.tiers={}"], ".default_tier: needs tiers"),
        (
            ["gateway.api_keys=[{key: k, tier: gold}]"],
            ".api_keys: entry 0 names the tier 'gold'; tiers: free, pro, admin",
        ),
        (["gateway.limits.store=disk"], ".limits.store: must be one of memory, actor, redis, got 'disk'"),
        (["gateway.limits.store=redis"], ".limits: redis_url is missing"),
        (["gateway.limits.projects={acme: {rpm: 3}}"], ".limits.projects: must have keys of the form ORG/PROJECT"),
        (["gateway.limits.store=memory", "gateway_replicas=2"], ": limits.store memory counts in each gateway apart"),
    ],
)
def test_mistakes_are_found_by_name(changes: list[str], problem: str) -> None:
    (found,) = problems(raw(*changes))
    assert str(found).startswith(GATEWAY + problem)


def test_a_redis_url_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = LimitsConfig(store="redis", redis_url="env:LIMITS_REDIS_URL")
    with pytest.raises(ValueError, match="LIMITS_REDIS_URL"):
        limits.resolved_redis_url()
    monkeypatch.setenv("LIMITS_REDIS_URL", "redis://somewhere")
    assert limits.resolved_redis_url() == "redis://somewhere"


def test_which_tier_a_key_has() -> None:
    tiers = {"free": Tier(rpm=1), "pro": Tier()}
    assert resolve({}, None, "whatever") == ("default", UNLIMITED)
    assert resolve(tiers, "free", "default") == ("free", tiers["free"])
    assert resolve(tiers, "free", "pro") == ("pro", tiers["pro"])
    assert resolve(tiers, "free", "gold") is None
    assert resolve({"default": UNLIMITED}, None, "default") == ("default", UNLIMITED)


def test_whether_anything_is_limited() -> None:
    assert gateway_of(raw()).has_limits
    free = {"tiers": {"only": {"priority": 3, "max_tokens": 5}}, "default_tier": "only", "limits": {}, "api_keys": []}
    value = raw()
    value["applications"][0]["args"]["gateway"] = free
    assert not gateway_of(value).has_limits

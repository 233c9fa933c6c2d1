"""Which targets a request may use, in which order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deployments.config.failures import Failure
from deployments.config.routing import RoutingConfig, compiled
from deployments.config.routing_table import RoutingTable
from deployments.routing.plan import RoutePlan, RouteRequest, Unfit, plan

POOLS = ("fast", "long", "canary")
UPSTREAMS = ("elsewhere",)
TIERS = {"admin": 0, "pro": 10, "free": 20}


def table(**config: Any) -> RoutingTable:
    return compiled(RoutingConfig.model_validate(config), POOLS, UPSTREAMS, TIERS)


def planned(t: RoutingTable, **request: Any) -> RoutePlan:
    found = plan(RouteRequest("m", **request), t)
    assert found is not None
    return found


def first(t: RoutingTable, **request: Any) -> str:
    return planned(t, **request).candidates[0]


def test_without_routes_every_pool_has_its_own_name() -> None:
    t = table()
    for pool in POOLS:
        answer = plan(RouteRequest(pool), t)
        assert answer is not None and answer.candidates == (pool,)
    assert plan(RouteRequest("elsewhere"), t) is None and plan(RouteRequest("nobody"), t) is None


def test_a_pool_that_a_route_names_is_not_a_model() -> None:
    t = table(routes={"m": {"pools": ["fast"], "fallbacks": ["long"], "shadows": {"canary": 10}}})
    assert set(t.routes) == {"m"}


def test_an_upstream_that_can_stand_alone_is_a_model_and_may_be_a_share() -> None:
    def made(config: dict[str, Any], *standalone: str) -> RoutingTable:
        return compiled(RoutingConfig.model_validate(config), ("fast",), ("elsewhere", "far"), TIERS, standalone)

    assert set(made({}, "far").routes) == {"fast", "far"}
    split = made({"routes": {"m": {"pools": {"far": 1}, "fallbacks": ["elsewhere"]}}}, "far")
    assert planned(split).candidates == ("far", "elsewhere")
    assert planned(split.with_room({"far": 50}), num_tokens=51).candidates == ("elsewhere",)
    assert made({}).revision != made({}, "far").revision
    with pytest.raises(ValueError, match=r"routes\.m\.pools: unknown name 'elsewhere'; known: far, fast"):
        made({"routes": {"m": {"pools": ["elsewhere"]}}}, "far")


def test_weights_divide_the_requests() -> None:
    t = table(routes={"m": {"pools": {"fast": 90, "canary": 10}}})
    got = Counter(first(t, id=f"r{i}") for i in range(5000))
    assert 0.08 < got["canary"] / 5000 < 0.12
    assert {planned(t, id=f"r{i}").candidates for i in range(50)} == {("fast", "canary"), ("canary", "fast")}


def test_the_same_request_or_session_goes_the_same_way() -> None:
    t = table(routes={"m": {"pools": ["fast", "long", "canary"]}})
    assert len({planned(t, id="r").candidates for _ in range(20)}) == 1
    assert len({planned(t, id=f"r{i}", session="s").candidates for i in range(20)}) == 1
    assert len({first(t, id=f"r{i}", session=f"s{i}") for i in range(50)}) == 3


def test_a_larger_canary_keeps_the_requests_it_had() -> None:
    small, large = (table(routes={"m": {"pools": {"fast": 100 - w, "canary": w}}}) for w in (5, 20))
    ids = [f"r{i}" for i in range(1000)]
    before = {i for i in ids if first(small, id=i) == "canary"}
    assert before and before <= {i for i in ids if first(large, id=i) == "canary"}


def test_a_weight_of_zero_takes_a_pool_out() -> None:
    t = table(routes={"m": {"pools": {"fast": 1, "canary": 0}}})
    assert {planned(t, id=f"r{i}").candidates for i in range(20)} == {("fast",)}


def test_shadows_get_their_share() -> None:
    t = table(routes={"m": {"pools": ["fast"], "shadows": {"canary": 25}}})
    plans = [planned(t, id=f"r{i}") for i in range(2000)]
    assert {p.candidates for p in plans} == {("fast",)}
    assert 0.2 < sum(p.shadows == ("canary",) for p in plans) / 2000 < 0.3


def test_context_classes() -> None:
    t = table(
        routes={"m": {"pools": {"long": 99, "fast": 1}}},
        targets={"fast": {"max_tokens": 1000}, "long": {"max_tokens": 8000}},
    )
    assert planned(t, num_tokens=1000).candidates == ("fast", "long")
    assert planned(t, num_tokens=1001).candidates == ("long",)
    too_long = planned(t, num_tokens=8001)
    assert too_long.candidates == () and too_long.unfit is Unfit.CONTEXT


def test_what_a_pool_reports_limits_it_but_makes_no_class() -> None:
    t = table(routes={"m": {"pools": {"long": 99, "fast": 1}}}).with_room({"fast": 1000, "long": 4000, "gone": 1})
    got = Counter(first(t, id=f"r{i}", num_tokens=10) for i in range(200))
    assert got["long"] > 150
    assert planned(t, num_tokens=2000).candidates == ("long",)
    assert planned(t, num_tokens=5000).unfit is Unfit.CONTEXT


def test_tiers() -> None:
    t = table(routes={"m": {"pools": ["fast"], "fallbacks": ["elsewhere"]}}, tiers={"free": {"pools": ["long"]}})
    assert planned(t, tier="pro").candidates == ("fast", "elsewhere")
    assert planned(t, tier="free").unfit is Unfit.TIER
    shares = [planned(t, tier=tier).queue_share for tier in TIERS]
    assert shares == pytest.approx([1.0, 2 / 3, 1 / 3])
    assert table(tiers={"free": {"queue_share": 0.1}}).tiers["free"].queue_share == 0.1


def test_needs() -> None:
    t = table(routes={"m": {"pools": ["fast", "long"]}}, targets={"long": {"abilities": ["json"]}})
    assert planned(t, needs=frozenset({"json"})).candidates[0] in ("fast", "long")
    assert planned(t, needs=frozenset({"tools"})).candidates == ("fast",)
    assert planned(t, needs=frozenset({"x-ray"})).unfit is Unfit.ABILITY
    t = table(routes={"m": {"pools": ["fast"], "fallbacks": ["elsewhere"]}})
    assert planned(t, needs=frozenset({"logprobs"})).candidates == ("fast",)


def test_near_pools_first_and_far_ones_to_spill_over_to() -> None:
    t = table(
        routes={"m": {"pools": {"fast": 1, "long": 1000, "canary": 1000}, "fallbacks": ["elsewhere"]}},
        targets={"fast": {"zone": "a", "region": "r"}, "long": {"zone": "b", "region": "r"}, "canary": {"region": "q"}},
    )
    assert planned(t, zone="a", region="r").candidates == ("fast", "long", "canary", "elsewhere")
    assert planned(t, zone="b", region="r").candidates == ("long", "fast", "canary", "elsewhere")


@given(
    st.dictionaries(st.sampled_from(POOLS), st.floats(0, 100), min_size=1),
    st.lists(st.sampled_from((*POOLS, *UPSTREAMS)), max_size=4),
    st.text(max_size=8),
    st.sampled_from(tuple(TIERS)),
    st.integers(0, 3000),
)
def test_any_plan_names_each_allowed_target_once(
    pools: dict[str, float], fallbacks: list[str], session: str, tier: str, num_tokens: int
) -> None:
    if not any(pools.values()):
        pools["fast"] = 1.0
    t = table(
        routes={"m": {"pools": pools, "fallbacks": fallbacks}},
        targets={"fast": {"max_tokens": 1000}, "elsewhere": {"max_tokens": 2000}},
        tiers={"free": {"pools": ["fast", "elsewhere"]}},
    )
    got = planned(t, session=session, tier=tier, num_tokens=num_tokens)
    assert len(set(got.candidates)) == len(got.candidates)
    assert set(got.candidates) <= {*(p for p, w in pools.items() if w > 0), *fallbacks}
    assert bool(got.candidates) == (got.unfit is None)
    assert all(t.targets[name].fits(num_tokens) for name in got.candidates)
    assert tier != "free" or set(got.candidates) <= {"fast", "elsewhere"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"routes": {"m": {"pools": ["nope"]}}}, "routes.m.pools: unknown name 'nope'; known: canary, fast, long"),
        ({"routes": {"m": {"pools": ["elsewhere"]}}}, "routes.m.pools: unknown name 'elsewhere'"),
        ({"routes": {"m": {"pools": ["fast"], "fallbacks": ["x"]}}}, "routes.m.fallbacks: unknown name 'x'"),
        ({"routes": {"m": {"pools": ["fast"], "shadows": {"x": 1}}}}, "routes.m.shadows: unknown name 'x'"),
        ({"targets": {"x": {}}}, "targets: unknown name 'x'"),
        ({"tiers": {"gold": {}}}, "tiers: unknown name 'gold'; known: admin, free, pro"),
        ({"tiers": {"free": {"pools": ["x"]}}}, "tiers.free.pools: unknown name 'x'"),
    ],
)
def test_unknown_names_are_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        table(**config)


@pytest.mark.parametrize(
    "route",
    [
        {"pools": {}},
        {"pools": {"fast": 0}},
        {"pools": {"fast": -1}},
        {"pools": ["fast"], "retry_on": ["rain"]},
        {"pools": ["fast"], "hedge_after_s": 0},
        {"pools": ["fast"], "colour": "red"},
    ],
)
def test_impossible_routes(route: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RoutingConfig.model_validate({"routes": {"m": route}})


def test_limits_come_through() -> None:
    t = table(routes={"m": {"pools": ["fast"], "deadline_s": 9, "retry_on": ["timeout"], "max_resumptions": 0}})
    limits = planned(t).limits
    assert (limits.deadline_s, limits.max_resumptions, limits.retry_on) == (9, 0, {Failure.TIMEOUT})


def test_revisions_tell_tables_apart() -> None:
    assert table().revision == table().revision != table(targets={"fast": {"zone": "a"}}).revision

"""Which replica of a pool is chosen."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.channel.replica_info import Load
from deployments.config.application import ModelConfig
from deployments.routing.policies import POLICIES
from deployments.routing.policies.base import Policy, ReplicaView, RouteHint
from deployments.routing.policies.round_robin import RoundRobin
from engine.config import EngineConfig

HINT = RouteHint(100)


def view(name: str = "r", load: Load | None = None, requests: int = 0, queued: int = 0, last: int = 0) -> ReplicaView:
    return ReplicaView(name, load or Load(), requests, queued, last)


loads = st.builds(Load, *(st.integers(0, 2**40) for _ in range(3)), st.floats(0, 1))
views = st.builds(view, st.text(), loads, st.integers(0, 9999), st.integers(0, 2**40), st.integers(0, 2**60))


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES.names())
@given(candidates=st.lists(views, min_size=1, max_size=64), seed=st.integers())
def test_every_policy_gives_an_index_and_depends_on_nothing_else(
    name: str, candidates: list[ReplicaView], seed: int
) -> None:
    policy: Policy = POLICIES.get(name)()
    chosen = policy.choose(candidates, HINT, random.Random(seed))
    assert 0 <= chosen < len(candidates)
    assert POLICIES.get(name)().choose(candidates, HINT, random.Random(seed)) == chosen


def test_round_robin_goes_round_while_replicas_come_and_go() -> None:
    last = dict.fromkeys("abc", 0)
    turns = []

    def turn() -> None:
        views = [view(name, last=at) for name, at in last.items()]
        name = views[RoundRobin().choose(views, HINT, random.Random(0))].id
        turns.append(name)
        last[name] = len(turns)

    for _ in range(4):
        turn()
    assert turns == ["a", "b", "c", "a"]
    del last["b"]
    last["d"] = 0
    for _ in range(4):
        turn()
    assert turns[4:] == ["d", "c", "a", "d"]


def test_the_policys_name_is_checked() -> None:
    engine = EngineConfig(model="m")
    for name in POLICIES.names():
        assert ModelConfig(name="m", engine=engine, routing_policy=name).routing_policy == name
    with pytest.raises(ValueError, match=r"unknown routing policy 'nearest'; known: .*least_loaded"):
        ModelConfig(name="m", engine=engine, routing_policy="nearest")

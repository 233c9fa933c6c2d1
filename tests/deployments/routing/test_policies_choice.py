"""Every policy by what all must do, then each by its own promise."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.channel.replica_info import Load
from deployments.routing.policies import POLICIES
from deployments.routing.policies.base import ReplicaView, RouteHint

HINT = RouteHint(100)


def view(name: str, requests: int = 0, queued: int = 0, load: Load | None = None, **more: float) -> ReplicaView:
    return ReplicaView(name, load or Load(), requests, queued, int(more.get("last", 0)), more.get("ttft"))


views = st.lists(
    st.builds(
        view,
        st.text("abcdef", min_size=1, max_size=4),
        st.integers(0, 500),
        st.integers(0, 10**6),
        st.builds(Load, st.integers(0, 500), st.integers(0, 500), st.integers(0, 10**6), st.floats(0, 1)),
    ),
    min_size=1,
    max_size=64,
    unique_by=lambda v: v.id,
)
hints = st.builds(
    RouteHint,
    st.integers(0, 10**5),
    st.none() | st.text(max_size=5),
    st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.integers(0, 10**5)),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES.names())
@given(candidates=views, hint=hints, seed=st.integers(0, 100))
def test_any_policy_answers_whatever_it_sees(
    name: str, candidates: list[ReplicaView], hint: RouteHint, seed: int
) -> None:
    policy = POLICIES.get(name)()
    chosen = policy.choose(candidates, hint, random.Random(seed))
    assert 0 <= chosen < len(candidates)
    assert policy.choose(candidates, hint, random.Random(seed)) == chosen  # nothing but rng decides


@pytest.mark.parametrize("name", [n for n in POLICIES.names() if n not in ("round_robin", "session")])
def test_ties_are_drawn(name: str) -> None:
    rng, policy = random.Random(0), POLICIES.get(name)()
    got = Counter(policy.choose([view(n) for n in "abcd"], HINT, rng) for _ in range(400))
    assert set(got) == {0, 1, 2, 3} and max(got.values()) < 200


@pytest.mark.parametrize("name", ["least_loaded", "prefix_affinity", "session"])
def test_the_idle_one_is_preferred(name: str) -> None:
    policy = POLICIES.get(name)()
    busy = [view("a", 3, 900), view("b", 3, 900), view("c"), view("d", 3, 900)]
    assert policy.choose(busy, HINT, random.Random(0)) == 2


def test_power_of_two_never_takes_the_worst() -> None:
    policy, rng = POLICIES.get("power_of_two")(), random.Random(0)
    got = {policy.choose([view("a", 1), view("b", 9), view("c", 5)], HINT, rng) for _ in range(100)}
    assert got == {0, 2}


def test_others_requests_count_too() -> None:
    policy = POLICIES.get("least_loaded")()
    seen = [view("a", load=Load(running=5, pending_tokens=4000)), view("b", 2, 300)]
    assert policy.choose(seen, HINT, random.Random(0)) == 1


def test_affinity_is_worth_the_prefill_it_saves_and_no_more() -> None:
    policy, hint = POLICIES.get("prefix_affinity")(), RouteHint(1100, None, {"a": 1000})
    for queued, chosen in ((0, 0), (900, 0), (1100, 1)):
        assert policy.choose([view("a", 0, queued), view("b")], hint, random.Random(0)) == chosen


def test_a_burst_of_equal_prompts_spreads() -> None:
    policy, rng, requests, queued = POLICIES.get("prefix_affinity")(), random.Random(0), Counter[str](), Counter[str]()
    cached: dict[str, int] = {}
    for _ in range(32):
        candidates = [view(n, requests[n], queued[n]) for n in "abcd"]
        chosen = candidates[policy.choose(candidates, RouteHint(2000, None, cached), rng)].id
        queued[chosen] += 2000 - cached.get(chosen, 0)
        requests[chosen] += 1
        cached[chosen] = 1984
    assert all(6 <= requests[n] <= 10 for n in "abcd")


def test_latency_prefers_the_quick_and_keeps_trying_the_slow() -> None:
    policy, rng = POLICIES.get("latency")(), random.Random(0)
    got = Counter(policy.choose([view("a", ttft=0.1), view("b", ttft=0.5)], HINT, rng) for _ in range(1000))
    assert got[0] > 900 and got[1] > 5
    assert policy.choose([view("a", ttft=0.1), view("b")], HINT, random.Random(1)) == 1
    assert policy.choose([view("a", 9, ttft=0.1), view("b", ttft=0.5)], HINT, random.Random(1)) == 1


def test_sessions_stay_and_few_move_when_a_replica_goes() -> None:
    policy, rng, four = POLICIES.get("session")(), random.Random(0), [view(n) for n in "abcd"]
    owner = {s: four[policy.choose(four, RouteHint(1, str(s)), rng)].id for s in range(400)}
    assert all(60 < n < 140 for n in Counter(owner.values()).values())
    three = four[:3]
    for session, was in owner.items():
        now = three[policy.choose(three, RouteHint(1, str(session)), rng)].id
        assert was == "d" or now == was


def test_sessions_that_are_alike_are_spread_as_well() -> None:
    policy, rng, many = POLICIES.get("session")(), random.Random(0), [view(f"{n:08x}") for n in range(16)]
    got = Counter(policy.choose(many, RouteHint(1, f"user-{s:06d}"), rng) for s in range(3200))
    assert len(got) == 16 and all(130 < n < 275 for n in got.values())


def test_a_busy_session_spills_over() -> None:
    policy, rng, requests = POLICIES.get("session")(), random.Random(0), Counter[str]()
    for _ in range(40):
        candidates = [view(n, requests[n]) for n in "abcd"]
        requests[candidates[policy.choose(candidates, RouteHint(1, "one"), rng)].id] += 1
    assert max(requests.values()) <= 1.25 * 10 + 3


def test_a_cancelled_choice_leaves_no_ghost() -> None:
    """Load is the caller's count: a policy keeps nothing that a cancelled request could leave behind."""
    for name in POLICIES.names():
        policy = POLICIES.get(name)()
        assert not vars(policy), name

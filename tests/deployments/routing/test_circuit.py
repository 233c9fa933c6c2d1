"""Circuit breakers, retry budgets and backlogs over simulated time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.backlog import ReplicaBacklog, ServiceRate, backlog_s, retry_after_s
from deployments.routing.circuit import Circuit, CircuitConfig, State
from deployments.routing.retry_budget import RetryBudget

CONFIG = CircuitConfig(failures=3, cooldown_s=1.0, max_cooldown_s=8.0, probe_s=5.0)


def opened(now_s: float = 0.0) -> Circuit:
    circuit = Circuit(CONFIG)
    for _ in range(CONFIG.failures):
        assert circuit.allow(now_s)
        circuit.failure(now_s)
    return circuit


def test_failures_in_a_row_open_it() -> None:
    circuit = opened(10.0)
    assert circuit.state(10.0) is State.OPEN and not circuit.allow(10.9)
    assert circuit.retry_after_s(10.4) == pytest.approx(0.6)


def test_a_success_between_failures_keeps_it_closed() -> None:
    circuit = Circuit(CONFIG)
    for _ in range(5):
        circuit.failure(0.0)
        circuit.failure(0.0)
        circuit.success(0.0)
    assert circuit.state(0.0) is State.CLOSED


def test_a_high_failure_rate_opens_it_without_a_row() -> None:
    circuit = Circuit(CircuitConfig(failures=1000, failure_rate=0.5, min_calls=20))
    for i in range(20):
        (circuit.failure if i % 2 else circuit.success)(i * 0.1)
    assert circuit.state(2.0) is State.OPEN


def test_old_failures_do_not_count() -> None:
    circuit = Circuit(CircuitConfig(failures=1000, failure_rate=0.5, min_calls=4, window_s=10.0))
    for _ in range(3):
        circuit.failure(0.0)
    for i in range(8):
        circuit.success(20.0 + i)
    circuit.failure(29.0)
    assert circuit.state(29.0) is State.CLOSED


def test_one_probe_at_a_time_and_a_success_closes_it() -> None:
    circuit = opened()
    assert circuit.would_allow(1.0)
    assert circuit.allow(1.0) and not circuit.allow(1.0) and not circuit.allow(2.0)
    circuit.success(2.0)
    assert circuit.state(2.0) is State.CLOSED and circuit.allow(2.0) and circuit.allow(2.0)


def test_a_failed_probe_doubles_the_cooldown_up_to_its_limit() -> None:
    circuit, now, waits = opened(), 0.0, []
    for _ in range(5):
        wait = circuit.retry_after_s(now)
        waits.append(wait)
        now += wait
        assert circuit.allow(now)
        circuit.failure(now)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_probe_that_says_nothing_leaves_room_for_the_next() -> None:
    circuit = opened()
    assert circuit.allow(1.0)
    circuit.neither(1.1)
    assert circuit.allow(1.1)  # nobody reports on this one
    assert not circuit.allow(5.0) and circuit.allow(6.2)


def test_calls_from_before_it_opened_neither_close_nor_reopen_it() -> None:
    circuit = opened()
    circuit.success(0.5)
    assert circuit.state(0.5) is State.OPEN
    circuit.failure(0.6)
    assert circuit.retry_after_s(0.6) == pytest.approx(0.4)


@given(st.lists(st.tuples(st.floats(0, 3), st.sampled_from(["ask", "ok", "bad", "neither"])), max_size=80))
def test_never_two_probes_and_never_a_call_while_open(steps: list[tuple[float, str]]) -> None:
    circuit, now, probing = Circuit(CONFIG), 0.0, None
    for wait, what in steps:
        now += wait
        state = circuit.state(now)
        if probing is not None and now - probing >= CONFIG.probe_s:
            probing = None
        if what == "ask":
            allowed = circuit.allow(now)
            assert allowed == (state is State.CLOSED or (state is State.HALF_OPEN and probing is None))
            if allowed and state is State.HALF_OPEN:
                probing = now
        else:
            {"ok": circuit.success, "bad": circuit.failure, "neither": circuit.neither}[what](now)
            if what == "neither" or circuit.state(now) is not State.HALF_OPEN:
                probing = None
        assert circuit.retry_after_s(now) <= CONFIG.max_cooldown_s


@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=400))
def test_a_dead_target_costs_no_more_than_a_probe_per_cooldown(gaps: list[float]) -> None:
    circuit, now, tried = Circuit(CONFIG), 0.0, 0
    for gap in gaps:
        now += gap
        if circuit.allow(now):
            tried += 1
            circuit.failure(now)
    assert tried <= CONFIG.failures + now / CONFIG.cooldown_s + 1


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=300))
def test_retries_stay_within_their_budget(steps: list[tuple[float, bool]]) -> None:
    budget, now, requests, retries = RetryBudget(ratio=0.2, per_s=1.0, most=5.0), 0.0, 0, 0
    for gap, retry in steps:
        now += gap
        if retry:
            retries += budget.take(now)
        else:
            requests += 1
            budget.request(now)
    assert retries <= 5.0 + 0.2 * requests + now + 1e-6


def test_a_storm_of_failures_is_not_amplified() -> None:
    budget = RetryBudget(ratio=0.2, per_s=0.0, most=10.0)
    retries = 0
    for _ in range(1000):
        budget.request(0.0)
        retries += budget.take(0.0)
    assert 200 <= retries <= 210


def test_the_rate_is_learnt_only_while_requests_wait() -> None:
    rate = ServiceRate()
    for second in range(5):
        rate.observe(second, 10 * second, waiting=False)
    assert rate.tokens_per_s is None
    for second in range(5, 10):
        rate.observe(second, 500 * second, waiting=True)
    assert rate.tokens_per_s == pytest.approx(500, rel=0.01)
    rate.observe(10.0, 0, waiting=True)  # the replica has started anew
    assert rate.tokens_per_s == pytest.approx(500, rel=0.01)


def test_a_backlog_is_the_shortest_of_the_pools() -> None:
    slow, quick = ReplicaBacklog(1000, 4, 100.0), ReplicaBacklog(1000, 4, 1000.0)
    assert backlog_s([slow, quick], 50.0) == pytest.approx(1.2)
    assert backlog_s([slow, ReplicaBacklog(400, 0, 100.0)], 50.0) == 0.0
    assert backlog_s([ReplicaBacklog(400, 9, None)], 50.0) == 0.0
    assert backlog_s([], 50.0) == 0.0


def test_the_lowest_tier_is_shed_first_and_told_when_to_return() -> None:
    shares = {"pro": 1.0, "free": 0.5}
    assert {tier: retry_after_s(4.0, 10.0, share) for tier, share in shares.items()} == {"pro": None, "free": None}
    assert {tier: retry_after_s(7.0, 10.0, share) for tier, share in shares.items()} == {"pro": None, "free": 2.0}
    assert {tier: retry_after_s(13.0, 10.0, share) for tier, share in shares.items()} == {"pro": 3.0, "free": 8.0}

"""The sliding minute against a plain log of everything admitted, and what Counters promise."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_limits import make_limit, make_reservation
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.limits.base import NOTHING, Amount, Grant, LimitKind, Refusal, Reservation
from deployments.limits.counters import Counters
from deployments.limits.window import SlidingWindow

REQUESTS, TOKENS, CONCURRENT = LimitKind.REQUESTS, LimitKind.TOKENS, LimitKind.CONCURRENT
LIMITS = (
    make_limit(REQUESTS, 6),
    make_limit(TOKENS, 100),
    make_limit(CONCURRENT, 3),
    make_limit(TOKENS, 150, "org:acme"),
)

STEPS = st.lists(
    st.tuples(
        st.sampled_from((0.0, 0.01, 0.1, 0.7, 5.0, 19.9, 31.0, 60.0, 60.1)),  # time passes
        st.one_of(
            st.tuples(st.just("ask"), st.integers(1, 110), st.just(0)),
            st.tuples(st.just("end"), st.integers(0, 20), st.integers(0, 110)),
        ),
    ),
    max_size=60,
)


def most_in_a_minute(log: list[tuple[float, int]]) -> int:
    return max((sum(n for t, n in log if end - 60 < t <= end) for end, _ in log), default=0)


@settings(max_examples=300)
@given(STEPS)
def test_no_minute_holds_more_than_the_limit_and_nothing_that_fits_is_refused(steps: list[Any]) -> None:
    counters, now_s = Counters(), 1000.0
    held: dict[str, tuple[float, Reservation, int]] = {}  # when, who, how much still counts
    running: list[Reservation] = []
    for passed_s, (what, number, spent) in steps:
        now_s += passed_s
        if what == "ask":
            one = make_reservation(*LIMITS, tokens=number)
            outcome = counters.reserve(one, now_s)
            if isinstance(outcome, Grant):
                held[one.id] = (now_s, one, number)
                running.append(one)
            else:
                assert isinstance(outcome, Refusal)
                # Only what was admitted within the last minute and one slice may be in the way.
                recent = [amount for at_s, _, amount in held.values() if now_s - at_s <= 60.1 + 1e-6]
                full = len(recent) + 1 > 6 or sum(recent) + number > 100 or len(running) + 1 > 3
                assert full
        elif running:
            one = running.pop(number % len(running))
            at_s, _, reserved = held[one.id]
            used = min(spent, reserved)
            counters.settle(one.id, Amount(1, used), now_s)
            held[one.id] = (at_s, one, used)
        log = [(at_s, amount) for at_s, _, amount in held.values()]
        assert most_in_a_minute(log) <= 100
        assert most_in_a_minute([(at_s, 1) for at_s, _ in log]) <= 6
        assert len(running) <= 3
        states = counters.peek(LIMITS, now_s)
        assert all(0 <= state.used <= state.limit.maximum for state in states)
        assert states[2].used == len(running)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 40)), min_size=1, max_size=40), st.integers(1, 100))
def test_a_refusal_says_exactly_when(history: list[tuple[float, int]], wanted: int) -> None:
    limit, now_s, counters = make_limit(TOKENS, 100), 50.0, Counters()
    for passed_s, tokens in history:
        now_s += passed_s
        counters.reserve(make_reservation(limit, tokens=tokens), now_s)
    outcome = counters.reserve(make_reservation(limit, tokens=wanted), now_s)
    if isinstance(outcome, Refusal):
        assert outcome.retry_after_s is not None and 0 < outcome.retry_after_s <= 60.11
        assert isinstance(
            counters.reserve(make_reservation(limit, tokens=wanted), now_s + outcome.retry_after_s - 0.11), Refusal
        )
        assert isinstance(
            counters.reserve(make_reservation(limit, tokens=wanted), now_s + outcome.retry_after_s), Grant
        )


@given(st.floats(-1e5, 1e5), st.integers(1, 50))
def test_a_clock_that_steps_counts_nothing_for_more_than_a_minute(step_s: float, number: int) -> None:
    window, now_s = SlidingWindow(), 1e6
    for i in range(number):
        window.add(1, now_s + i * 0.3)
    now_s += number * 0.3 + step_s
    assert window.used(now_s) in (0, number) if abs(step_s) > 90 else 0 <= window.used(now_s) <= number
    assert window.used(now_s + 60.2) == 0


def test_requests_and_tokens_have_clocks_of_their_own() -> None:
    """Nine requests of 38 tokens, each minute, under 10 RPM and 380 TPM: all of them fit."""
    counters, limits = Counters(), (make_limit(REQUESTS, 10), make_limit(TOKENS, 380))
    for now_s in (0.0, 61.0, 122.0):
        for _ in range(9):
            assert isinstance(counters.reserve(make_reservation(*limits, tokens=38), now_s), Grant)


def test_a_request_refused_for_its_place_costs_no_request() -> None:
    counters, limits = Counters(), (make_limit(REQUESTS, 2), make_limit(CONCURRENT, 1))
    first, second, third = (make_reservation(*limits) for _ in range(3))
    assert isinstance(counters.reserve(first, 0.0), Grant)
    refused = counters.reserve(second, 0.0)
    assert isinstance(refused, Refusal) and refused.state.limit.kind is CONCURRENT
    counters.settle(first.id, Amount(1, 0), 0.0)
    outcome = counters.reserve(third, 0.0)
    assert isinstance(outcome, Grant) and outcome.states[0].used == 2


def test_idle_meters_are_forgotten() -> None:
    counters = Counters()
    for i in range(100):
        one = make_reservation(make_limit(TOKENS, 10, f"key:{i}"), tokens=3)
        counters.reserve(one, float(i) / 100)
        counters.settle(one.id, NOTHING if i % 2 else Amount(1, 3), float(i) / 100)
    counters.reserve(make_reservation(make_limit(TOKENS, 10), tokens=1), 200.0)
    assert counters.names == {make_limit(TOKENS, 10).name}


def test_a_lowered_limit_holds_for_what_was_admitted_before() -> None:
    counters = Counters()
    assert isinstance(counters.reserve(make_reservation(make_limit(TOKENS, 100), tokens=80), 0.0), Grant)
    refused = counters.reserve(make_reservation(make_limit(TOKENS, 50), tokens=1), 1.0)
    assert isinstance(refused, Refusal) and refused.state.used == 80
    assert refused.retry_after_s == pytest.approx(59.1, abs=0.01)

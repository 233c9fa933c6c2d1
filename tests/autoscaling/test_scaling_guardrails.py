"""Guardrails, controller and GPU budget: what may never happen, whatever a policy says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from helpers_autoscaling import pool, sample
from hypothesis import given
from hypothesis import strategies as st

from autoscaling.base import Proposal, Signals, pool_signals
from autoscaling.budget import PoolWish, share
from autoscaling.controller import Controller
from autoscaling.guardrails import GuardrailParams, Guardrails
from autoscaling.settings import PolicyError


class Says:
    """A policy that says what it is told, or raises it."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def decide(self, signals: Signals, now_s: float) -> Any:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Proposal) or answer is None else Proposal(answer, "told")


def play(rails: Guardrails, wishes: list[float], signals: Any = pool, step_s: float = 1.0, start: int = 1) -> list[int]:
    """Targets over time; each target is reached at once."""
    targets, current = [], start
    for i, wish in enumerate(wishes):
        current = rails.apply(Proposal(wish, "told"), signals(current, i * step_s), i * step_s).target
        targets.append(current)
    return targets


@pytest.mark.slow
@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=60),
    st.integers(0, 5),
    st.integers(0, 20),
    st.floats(0, 60),
    st.floats(0, 30),
)
def test_bounds_and_step_limits_hold_whatever_is_wished(
    wishes: list[float], low: int, more: int, window_s: float, cooldown_s: float
) -> None:
    params = GuardrailParams(
        min_replicas=low, max_replicas=max(1, low + more), downscale_window_s=window_s, downscale_cooldown_s=cooldown_s
    )
    targets = play(Guardrails(params), wishes, start=max(1, low))
    before = max(1, low)
    for target in targets:
        assert params.min_replicas <= target <= params.max_replicas
        assert target <= max(before + params.max_up_step, before * params.max_up_factor)
        assert before - target <= max(1, math.floor(before * params.max_down_share))
        before = target


@pytest.mark.slow
@given(st.lists(st.floats(0, 30), min_size=1, max_size=80), st.integers(1, 30))
def test_the_target_never_falls_below_the_highest_wish_of_the_window(wishes: list[float], window: int) -> None:
    params = GuardrailParams(max_replicas=100, downscale_window_s=window, downscale_cooldown_s=0, max_up_factor=1000)
    targets = play(Guardrails(params), wishes)
    for i, target in enumerate(targets):
        assert target >= wishes[i] - 0.051  # a twentieth of a replica is none
        if i and target < targets[i - 1]:
            assert target >= max(wishes[max(0, i - window) : i + 1]) - 0.051


def test_a_new_controller_does_not_scale_down_before_it_has_seen_a_window() -> None:
    params = GuardrailParams(max_replicas=10, downscale_window_s=100, downscale_cooldown_s=0)
    targets = play(Guardrails(params), [1.0] * 150, start=8)
    assert targets[:100] == [8] * 100
    assert targets[100] < 8 and targets[-1] == 1


def test_panic_overrides_speed_limits_and_holds_what_is_there() -> None:
    params = GuardrailParams(max_replicas=50, upscale_cooldown_s=1000, downscale_window_s=0, panic_s=60)
    rails = Guardrails(params)
    assert rails.apply(Proposal(3, "w"), pool(1, 0.0), 0.0).target == 3
    assert rails.apply(Proposal(5, "w"), pool(3, 1.0), 1.0).target == 3  # cooldown
    assert rails.apply(Proposal(40, "w"), pool(3, 2.0, backlog_s=9.0), 2.0).target == 40
    guarded = rails.apply(Proposal(1, "w"), pool(40, 50.0), 50.0)
    assert guarded.target == 40 and "panic" in guarded.limits
    assert rails.apply(Proposal(1, "w"), pool(40, 70.0), 70.0).target < 40


def test_flapping_makes_the_window_longer() -> None:
    params = GuardrailParams(
        max_replicas=10, downscale_window_s=10, downscale_cooldown_s=0, flap_limit=4, max_down_share=1.0
    )
    wishes = ([5.0] + [1.0] * 39) * 12
    targets = play(Guardrails(params), wishes)
    held = [sum(t == 5 for t in targets[i : i + 40]) for i in range(0, len(targets), 40)]
    assert held[0] <= 12 and held[-1] == 40


def test_an_idle_pool_goes_to_zero_before_a_long_window_is_over() -> None:
    params = GuardrailParams(
        min_replicas=0, max_replicas=4, idle_to_zero_s=60, downscale_window_s=600, downscale_cooldown_s=0
    )

    def signals(current: int, now_s: float) -> Signals:
        idle = {"running": 0.0, "arrival_rate": 0.0, "utilisation": 0.0} if now_s >= 650 else {}
        return pool(current, now_s, **idle)

    targets = play(Guardrails(params), [3.0] * 650 + [0.0] * 100, signals)
    assert targets[650:700] == [3] * 50 and targets[-1] == 0


def test_zero_and_back() -> None:
    """Idle goes to zero after its time, one request brings one replica, and what loads is not sent away."""
    params = GuardrailParams(
        min_replicas=0, max_replicas=4, idle_to_zero_s=60, downscale_window_s=10, protect_start_s=60
    )
    controller = Controller(Says(0.0), Guardrails(params))
    idle: dict[str, Any] = {"running": 0.0, "arrival_rate": 0.0, "utilisation": 0.0}
    targets = [controller.decide(pool(1, float(t), **idle), float(t)).target for t in range(61)]
    assert targets[:60] == [1] * 60 and targets[-1] == 0
    empty = {"serving": 0, "now_s": 100.0}
    assert controller.decide(pool_signals([], starting=0, target=0, queued=1, **empty), 100.0).target == 1
    for t in range(101, 400):  # loads for five minutes, and five more come
        signals = pool_signals([], float(t), serving=0, starting=1, target=1, queued=min(6, t - 100))
        assert controller.decide(signals, float(t)).target == 1
    targets = [controller.decide(pool(1, 400.0 + t, **idle), 400.0 + t).target for t in range(61)]
    assert targets[:60] == [1] * 60 and targets[-1] == 0
    again = controller.decide(pool_signals([], 471.0, serving=0, starting=0, target=0, queued=1), 471.0)
    assert again.target == 1 and "cold_start" in again.limits


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (RuntimeError("boom"), "RuntimeError: boom"),
        (math.nan, "nan replicas"),
        (math.inf, "inf replicas"),
        (-math.inf, "-inf replicas"),
        (None, "not a Proposal"),
        (Proposal(True, "w"), "True replicas"),
        (Proposal("three", "w"), "'three' replicas"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_policy_keeps_the_last_target_and_says_why(answer: Any, fault: str) -> None:
    controller = Controller(Says(4.0, answer, 6.0), Guardrails(GuardrailParams()))
    assert controller.decide(pool(1, 0.0), 0.0).target == 4
    held = controller.decide(pool(4, 1.0), 1.0)
    assert held.target == 4 and held.fault is not None and fault in held.fault
    after = controller.decide(pool(4, 2.0), 2.0)
    assert after.target == 6 and after.fault is None


def test_blackout_holds_even_against_the_policy() -> None:
    controller = Controller(Says(1.0), Guardrails(GuardrailParams(downscale_window_s=0)))
    stale = pool_signals([sample(0.0)] * 4, 60.0, serving=4, starting=0, target=4)
    decision = controller.decide(stale, 60.0)
    assert decision.target == 4 and decision.fault is not None and "stale" in decision.fault


@given(
    st.floats(0, 64),
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20), st.sampled_from([0.5, 1.0, 2.0, 8.0]), st.integers(0, 2)),
        max_size=6,
    ),
)
def test_budget(total: float, pools: list[tuple[int, int, float, int]]) -> None:
    wishes = [
        PoolWish(str(i), wanted=w, min_replicas=m, gpus_per_replica=g, priority=p)
        for i, (w, m, g, p) in enumerate(pools)
    ]
    given_ = share(total, wishes)
    assert sum(given_[w.name] * w.gpus_per_replica for w in wishes) <= total + 1e-6
    assert all(0 <= given_[w.name] <= w.wanted for w in wishes)
    left = total - sum(given_[w.name] * w.gpus_per_replica for w in wishes)
    assert all(given_[w.name] == w.wanted or w.gpus_per_replica > left - 1e-6 for w in wishes), "GPUs left over"


def test_budget_by_rank() -> None:
    chat = PoolWish("chat", wanted=6, min_replicas=1, priority=0)
    code = PoolWish("code", wanted=6, min_replicas=1, priority=0)
    batch = PoolWish("batch", wanted=9, min_replicas=2, priority=9)
    assert share(8, [chat, code, batch]) == {"chat": 3, "code": 3, "batch": 2}
    assert share(1, [batch, code, chat]) == {"batch": 0, "code": 1, "chat": 0}


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"min_replicas": 9, "max_replicas": 3}, "guardrails.min_replicas: must be at most max_replicas 3, got 9"),
        ({"max_replica": 3}, "unknown setting max_replica; known: min_replicas"),
        ({"panic_s": math.nan}, "guardrails.panic_s: must be finite"),
        ({"max_up_step": 1.5}, "guardrails.max_up_step: must be a whole number, got 1.5"),
        ({"max_down_share": 2}, "guardrails.max_down_share: must be at most 1, got 2"),
        ({"min_replicas": "two"}, "guardrails.min_replicas: must be a number, got 'two'"),
        ([1], "guardrails: must be a mapping"),
    ],
)
def test_wrong_settings_name_the_field(given_: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message.replace("[", r"\[")):
        GuardrailParams.from_dict(given_, "guardrails")

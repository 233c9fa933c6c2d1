"""GPUs shared by pools that Serve's controller asks one by one."""

from __future__ import annotations

import gc
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autoscaling.budget import PoolWish, SharedBudget, share, shared_budget
from autoscaling.serve_adapter import ServePolicy
from autoscaling.settings import PolicyError


def test_a_large_replica_that_does_not_fit_does_not_hold_up_small_ones() -> None:
    assert share(5, [PoolWish("big", 2, 0, 4), PoolWish("small", 9, 0, 1, 1)]) == {"big": 1, "small": 1}


def test_what_is_refused() -> None:
    with pytest.raises(PolicyError, match="names must differ"):
        share(1, [PoolWish("a"), PoolWish("a")])
    with pytest.raises(PolicyError, match="total_gpus: must be at least 0, got -1"):
        share(-1, [])


class Pool:
    """Stands for one."""


def test_a_pool_that_serve_does_not_ask_about_is_being_woken() -> None:
    budget, a, b = SharedBudget(), Pool(), Pool()
    budget.update(a, PoolWish("a", 4, 1), 0.0)
    budget.update(b, PoolWish("b", 0, 0, priority=-1), 0.0)
    assert budget.grant("a", 4, 0.5) == 4
    for now_s in (2.0, 3.0):
        budget.update(a, PoolWish("a", 4, 1), now_s)
    assert budget.grant("a", 4, 3.0) == 3


@pytest.mark.slow
def test_what_is_gone_takes_nothing() -> None:
    budget, a, b, again = SharedBudget(), Pool(), Pool(), Pool()
    budget.update(a, PoolWish("a", 4), 0.0)
    budget.update(b, PoolWish("b", 4), 0.0)
    budget.update(again, PoolWish("b", 1), 0.0)  # deployed again: the old policy lingers
    assert budget.grant("a", 4, 0.0) == 3
    del again
    gc.collect()
    assert budget.grant("a", 4, 0.0) == 4


def test_it_is_one_of_each_name() -> None:
    one = shared_budget("app")
    assert shared_budget("app") is one and shared_budget("other") is not one


class Inline(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@dataclass
class Context:
    """As much of Serve's as the adapter reads; nobody reports, requests wait."""

    current_time: float
    target_num_replicas: int
    total_queued_requests: float = 0.0
    app_name: str = "two-pools"
    running_replicas: list[Any] = field(default_factory=list)
    raw_metrics: dict[str, Any] = field(default_factory=dict)
    last_scale_up_time: float | None = None


def pool(name: str, floor: int, logs: Path, **terms: Any) -> ServePolicy:
    """Wants `floor` replicas, or one where that is none and requests wait."""
    policy = {
        "policy": "schedule",
        "min_replicas": 0,
        "max_replicas": 9,
        "params": {"otherwise": floor},
        "guardrails": {"downscale_window_s": 0, "downscale_cooldown_s": 0, "max_up_step": 9, "max_down_share": 1.0},
    }
    return ServePolicy(name, policy, {"gpus": 4, **terms}, executor=Inline(), logs=logs)


def play(seconds: int, begin_s: float, targets: dict[ServePolicy, int]) -> None:
    """Serve's loop: every pool in turn, ten times a second. Each then has what it was given."""
    for tick in range(10 * seconds):
        for policy, target in targets.items():
            targets[policy], _ = policy(Context(begin_s + tick / 10, target))


@pytest.mark.slow
def test_the_more_important_pool_gets_its_wish_and_the_other_the_rest(tmp_path: Path) -> None:
    batch, chat = pool("batch", 4, tmp_path, priority=10), pool("chat", 0, tmp_path)
    targets = {batch: 0, chat: 0}
    play(5, 1000.0, targets)
    assert targets == {batch: 4, chat: 0}
    busy = pool("chat", 3, tmp_path)  # deployed again with another schedule
    targets = {batch: 4, busy: 0}
    play(5, 1010.0, targets)
    assert targets == {batch: 1, busy: 3}
    limits = (tmp_path / "autoscaling_batch.log").read_text()
    assert '"limits": ["gpu_budget"]' in limits
    alone = {batch: 1}
    del busy, targets
    gc.collect()
    play(5, 1020.0, alone)
    assert alone == {batch: 4}


def test_a_pool_that_requests_wake_takes_a_replica_and_keeps_it(tmp_path: Path) -> None:
    batch, chat = pool("batch", 9, tmp_path), pool("chat", 0, tmp_path, priority=10)
    targets = {batch: 0, chat: 0}
    play(5, 1000.0, targets)
    assert targets == {batch: 4, chat: 0}
    alone = {batch: 4}
    play(5, 1005.0, alone)  # Serve has given chat a replica, and asks again when it serves
    assert alone == {batch: 3}
    for tick in range(30):
        assert chat(Context(1010.0 + tick / 10, 1, 1.0))[0] == 1
        assert batch(Context(1010.0 + tick / 10, 3))[0] == 3


def test_pools_of_other_applications_do_not_count(tmp_path: Path) -> None:
    ours, theirs = pool("a", 3, tmp_path), pool("b", 3, tmp_path)
    a = b = 0
    for tick in range(30):
        a, _ = ours(Context(1000.0 + tick / 10, a, app_name="ours"))
        b, _ = theirs(Context(1000.0 + tick / 10, b, app_name="theirs"))
    assert (a, b) == (3, 3)


def test_replicas_may_take_several_gpus_or_a_part_of_one(tmp_path: Path) -> None:
    big, small = pool("big", 3, tmp_path, gpus_per_replica=2), pool("small", 9, tmp_path, gpus_per_replica=0.5)
    targets = {big: 0, small: 0}
    play(5, 1000.0, targets)
    assert 2 * targets[big] + 0.5 * targets[small] == 4 and targets[big] == 1


@pytest.mark.parametrize("wrong", [{"gpus": -1}, {"gpus_per_replica": 0}, {"rank": 1}])
def test_a_budget_that_cannot_be_read_keeps_the_replicas(wrong: dict[str, Any], tmp_path: Path) -> None:
    targets = {pool("a", 4, tmp_path, **wrong): 2}
    play(3, 1000.0, targets)
    assert list(targets.values()) == [2]

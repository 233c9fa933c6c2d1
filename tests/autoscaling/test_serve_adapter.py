"""The class that Serve's controller calls: it never raises, whatever it is given, and says why it decided."""

from __future__ import annotations

import json
import math
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
from helpers_autoscaling import Id, Inline, Point
from hypothesis import given
from hypothesis import strategies as st

from autoscaling.base import ReplicaSample
from autoscaling.serve_adapter import ServePolicy

CALM = {
    "waiting": 0.0, "running": 2.0, "pending_tokens": 0.0, "backlog_s": 0.0, "utilisation": 0.35, "seats_used": 0.1,
    "kv_usage": 0.1, "arrival_rate": 5.0, "ttft_p50_s": 0.1, "ttft_p95_s": 0.3, "itl_p95_s": 0.02, "startup_s": 5.0,
}  # fmt: skip
LATE = CALM | {"waiting": 40.0, "pending_tokens": 9000.0, "backlog_s": 12.0, "utilisation": 1.0, "ttft_p95_s": 9.0}


class Never(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        return Future()


class Context:
    """As much of Serve's as the adapter reads."""

    def __init__(
        self,
        now_s: float,
        replicas: int,
        target: int,
        raw: dict[str, Any],
        queued: Any = 0.0,
        last_up_s: float | None = None,
        app: str = "app",
    ) -> None:
        self.current_time = now_s
        self.running_replicas = [Id(f"r{i}") for i in range(replicas)]
        self.target_num_replicas = target
        self.raw_metrics = raw
        self.total_queued_requests = queued
        self.last_scale_up_time = last_up_s
        self.app_name = app


def raw(now_s: float, *replicas: dict[str, Any] | None) -> dict[str, dict[Id, list[Point]]]:
    """Metrics as Serve has them; None: that replica says nothing."""
    names = {name for r in replicas if r for name in r}
    return {
        name: {Id(f"r{i}"): [Point(now_s, r[name])] for i, r in enumerate(replicas) if r and name in r}
        for name in names
    }


def policy(tmp_path: Path | None = None, executor: Executor | None = None, **given: Any) -> ServePolicy:
    mapping = {"policy": "slo", "min_replicas": 1, "max_replicas": 6, **given}
    return ServePolicy("chat", mapping, executor=executor or Inline(), logs=tmp_path)


def run(p: ServePolicy, seconds: int, replicas: int, target: int, *said: Any, begin_s: float = 1000.0) -> list[int]:
    """Ten calls a second. The pool stands still, whatever is decided."""
    out = []
    for tick in range(10 * seconds):
        now_s = begin_s + tick / 10
        count, state = p(Context(now_s, replicas, target, raw(now_s, *said)))
        assert state == {} and isinstance(count, int)
        out.append(count)
    return out


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "autoscaling_chat.log").read_text().splitlines()]


def test_a_queue_scales_up_and_says_why(tmp_path: Path) -> None:
    assert max(run(policy(tmp_path), 3, 1, 1, LATE)) > 1
    first = lines(tmp_path)[0]
    assert first["pool"] == "chat" and first["from"] == 1 and first["to"] > 1 and first["fault"] is None
    assert first["why"] == "backlog" and first["signals"]["backlog_s"] == 12.0 and first["terms"]["clearing"] > 0


def test_one_decision_a_second_and_nothing_between(tmp_path: Path) -> None:
    asked = 0

    class Counting(Inline):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            nonlocal asked
            asked += 1
            return super().submit(fn, *args, **kwargs)

    said = run(policy(tmp_path, Counting()), 5, 1, 1, LATE)
    assert asked == 5 and 1 < sum(n > 1 for n in said) <= 5
    assert len(lines(tmp_path)) == 5  # each would have changed the target
    quiet = policy(tmp_path / "q")
    run(quiet, 130, 2, 2, CALM, CALM)
    assert len(lines(tmp_path / "q")) <= 4  # one a minute when nothing changes


def test_what_is_missing_is_unknown_and_not_zero(tmp_path: Path) -> None:
    without = {name: value for name, value in CALM.items() if name not in ("ttft_p95_s", "backlog_s")}
    run(policy(tmp_path), 2, 1, 1, without)
    signals = lines(tmp_path)[0]["signals"]
    assert "ttft_p95_s" not in signals and "backlog_s" not in signals and signals["utilisation"] == 0.35


def test_an_old_value_beside_newer_ones_is_unknown(tmp_path: Path) -> None:
    p = policy(tmp_path)
    points = {name: {Id("r0"): [Point(10.0, value)]} for name, value in CALM.items()}
    points["ttft_p95_s"] = {Id("r0"): [Point(8.0, 7.0)]}
    for tick in range(3):
        p(Context(1000.0 + tick, 1, 1, points))
    assert "ttft_p95_s" not in lines(tmp_path)[0]["signals"]


def test_a_silent_replica_counts_as_the_mean_and_a_blackout_holds(tmp_path: Path) -> None:
    p = policy(tmp_path)
    run(p, 70, 2, 2, CALM, None)
    assert lines(tmp_path)[-1]["signals"]["utilisation"] == 0.7
    frozen = raw(1069.0, CALM, None)
    for tick in range(300):
        now_s = 1070.0 + tick / 10
        count, _ = p(Context(now_s, 2, 2, frozen))
        assert count == 2
    assert lines(tmp_path)[-1]["fault"].startswith("stale")


def test_startup_is_measured_from_the_decision_on(tmp_path: Path) -> None:
    p = policy(tmp_path)
    run(p, 3, 1, 1, CALM)
    run(p, 7, 1, 2, CALM, begin_s=1003.0)
    run(p, 70, 2, 2, CALM, CALM, begin_s=1010.0)
    assert lines(tmp_path)[-1]["signals"]["startup_s"] == pytest.approx(7.0, abs=1.1)


@pytest.mark.parametrize(
    "broken",
    [{"policy": "nope"}, {"params": {"ttft_slo_s": -1}}, {"max_replicas": 0}, {"guardrails": 3}, {"policy": None}],
)
def test_a_policy_that_cannot_be_made_keeps_the_replicas(broken: dict[str, Any]) -> None:
    assert set(run(policy(**broken), 3, 2, 2, LATE, LATE)) == {2}


@pytest.mark.parametrize("value", [math.nan, math.inf, "many", None, RuntimeError("boom")])
def test_a_policy_that_raises_or_says_nonsense_keeps_the_replicas(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autoscaling.base import Proposal
    from autoscaling.policies.slo import LatencySlo

    def decide(self: LatencySlo, signals: Any, now_s: float) -> Proposal:
        if isinstance(value, Exception):
            raise value
        return Proposal(value, "nonsense")

    monkeypatch.setattr(LatencySlo, "decide", decide)
    assert set(run(policy(tmp_path), 3, 3, 3, LATE, LATE, LATE)) == {3}
    assert lines(tmp_path)[0]["why"] == "hold" and lines(tmp_path)[0]["fault"]


def test_a_policy_that_never_answers_does_not_block() -> None:
    assert set(run(policy(executor=Never()), 60, 2, 2, LATE, LATE)) == {2}


def test_a_context_without_anything_is_survived() -> None:
    class Empty:
        target_num_replicas = 4

    assert policy()(Empty()) == (4, {})


VALUES = st.one_of(st.floats(), st.none(), st.text(max_size=3), st.integers(-5, 10**9), st.booleans())


@given(st.lists(st.dictionaries(st.sampled_from([*ReplicaSample._fields, "x"]), VALUES), max_size=4), st.integers(0, 9))
def test_whatever_replicas_say_the_target_gets_within_bounds(said: list[dict[str, Any]], target: int) -> None:
    """Once replicas have had the time to report. What cannot be read as numbers leaves the target as it is."""
    values = [value for known in said for name, value in known.items() if name in ReplicaSample._fields[1:]]
    p, asked = policy(), target
    for tick in range(30):
        now_s = 1000.0 + tick / 2
        target, state = p(Context(now_s, len(said), target, raw(now_s, *said), queued=None))
        assert state == {}
    if all(is_number(value) for value in values):
        assert 1 <= target <= 6
    else:
        assert target == asked


def is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def test_a_pool_that_just_came_up_is_not_called_stale(tmp_path: Path) -> None:
    p = policy(tmp_path)
    run(p, 5, 1, 1, None)
    assert not (tmp_path / "autoscaling_chat.log").exists()
    run(p, 10, 1, 1, None, begin_s=1005.0)
    assert lines(tmp_path)[0]["fault"].startswith("stale")


def test_a_replica_that_has_just_begun_is_not_silent(tmp_path: Path) -> None:
    """It has no load yet: sums doubled by it would have the pool grow because it grew."""
    p = policy(tmp_path)
    run(p, 30, 1, 1, CALM)
    run(p, 3, 2, 2, LATE, None, begin_s=1030.0)
    assert lines(tmp_path)[-1]["signals"]["utilisation"] == 1.0


def idle_pool(tmp_path: Path) -> ServePolicy:
    brief = {"idle_to_zero_s": 3, "protect_start_s": 2, "downscale_window_s": 2, "downscale_cooldown_s": 0}
    return policy(tmp_path, min_replicas=0, guardrails=brief)


IDLE = dict.fromkeys(CALM, 0.0) | {"startup_s": 5.0}


@pytest.mark.slow
def test_an_idle_pool_goes_to_zero_and_no_sooner(tmp_path: Path) -> None:
    said = run(idle_pool(tmp_path), 8, 1, 1, IDLE)
    assert 0 not in said[:30] and 0 in said
    assert lines(tmp_path)[-1]["to"] == 0
    assert set(run(idle_pool(tmp_path / "b"), 20, 1, 1, CALM)) == {1}
    assert set(run(policy(tmp_path / "c", guardrails={"idle_to_zero_s": 0}), 300, 1, 1, IDLE)) == {1}  # min_replicas 1


def test_a_pool_that_is_starting_is_not_sent_back(tmp_path: Path) -> None:
    """Serve has been asked for a replica by a request that has given up meanwhile."""
    p = idle_pool(tmp_path)
    assert set(run(p, 20, 0, 0)) == {0}
    assert set(run(p, 60, 0, 1, begin_s=1020.0)) == {1}


def test_a_decision_made_before_the_pool_was_woken_does_not_count(tmp_path: Path) -> None:
    """Serve does not ask while a pool wakes: the first call after that finds the last decision from before."""
    p = idle_pool(tmp_path)
    assert set(run(p, 20, 0, 0)) == {0}
    assert p(Context(1020.0, 0, 0, {})) == (0, {})  # thinks, and is not heard before the pool is up
    counts = [p(Context(1030.0 + t / 10, 1, 1, raw(1030.0 + t / 10, IDLE), last_up_s=1024.0))[0] for t in range(15)]
    assert set(counts) == {1}
    woken, *_ = [line for line in lines(tmp_path) if line["why"] == "woken"]
    assert (woken["from"], woken["to"]) == (0, 1)
    run(p, 62, 1, 1, CALM, begin_s=1031.5)
    assert lines(tmp_path)[-1]["signals"]["startup_s"] == pytest.approx(6.0, abs=0.2)  # from being woken to being seen


def test_an_old_scale_up_does_not_make_a_long_start(tmp_path: Path) -> None:
    p = policy(tmp_path)
    run(p, 3, 1, 1, CALM)
    for tick in range(640):  # a redeployment set the target: Serve remembers an hour-old decision
        now_s = 1003.0 + tick / 10
        serving = 1 if now_s < 1008.0 else 2
        p(Context(now_s, serving, 2, raw(now_s, *[CALM] * serving), last_up_s=2.0))
    assert lines(tmp_path)[-1]["signals"]["startup_s"] < 7.0

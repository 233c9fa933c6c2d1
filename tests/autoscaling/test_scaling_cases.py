"""What went wrong elsewhere, played to the class that Serve calls: replicas that fall silent, and starts under load.
See also test_scaling_policies (up and at once down) and test_serve_rest (to zero and back)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from helpers_autoscaling import Id, Inline, Point

from autoscaling.serve_adapter import ServePolicy

BUSY = {
    "waiting": 0.0, "running": 8.0, "pending_tokens": 0.0, "backlog_s": 0.0, "utilisation": 0.65, "seats_used": 0.2,
    "kv_usage": 0.2, "arrival_rate": 5.0, "ttft_p50_s": 0.1, "ttft_p95_s": 0.3, "itl_p95_s": 0.02, "startup_s": 20.0,
}  # fmt: skip
DOUBLED = BUSY | {"utilisation": 1.0, "arrival_rate": 10.0, "waiting": 9.0, "pending_tokens": 2000.0, "backlog_s": 3.0}


@dataclass
class Pool:
    """Serve's view. `now_s` goes on by a tenth of a second a call; each replica says what `said` has for it, or, at
    None, nothing new any more."""

    serving: int
    target: int
    policy: ServePolicy = field(default_factory=lambda: policy())
    now_s: float = 1000.0
    raw: dict[str, dict[Id, list[Point]]] = field(default_factory=dict)
    app_name: str = "app"
    total_queued_requests: float = 0.0
    last_scale_up_time: float | None = None

    @property
    def current_time(self) -> float:
        return self.now_s

    @property
    def target_num_replicas(self) -> int:
        return self.target

    @property
    def running_replicas(self) -> list[Id]:
        return [Id(f"r{i}") for i in range(self.serving)]

    @property
    def raw_metrics(self) -> dict[str, dict[Id, list[Point]]]:
        return self.raw

    def play(self, seconds: float, *said: dict[str, float] | None) -> list[int]:
        """The targets. What is decided counts."""
        targets = []
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            for i, values in enumerate(said):
                for name, value in (values or {}).items():
                    self.raw.setdefault(name, {})[Id(f"r{i}")] = [Point(self.now_s, value)]
            self.target, _state = self.policy(self)
            targets.append(self.target)
        return targets


def policy() -> ServePolicy:
    mapping = {"policy": "slo", "min_replicas": 1, "max_replicas": 32, "params": {"startup_s": 20}}
    mapping["guardrails"] = {"downscale_window_s": 120}
    return ServePolicy("chat", mapping, executor=Inline())


def test_one_silent_replica_does_not_stop_the_others_from_scaling() -> None:
    pool = Pool(4, 4)
    assert set(pool.play(60, *[BUSY] * 4)) <= {4, 5}
    before = pool.target
    pool.play(20, *[DOUBLED] * 3, None)
    assert pool.target > before


@pytest.mark.slow
def test_a_blackout_holds_and_after_a_restart_nothing_goes_down_before_a_window() -> None:
    pool = Pool(4, 4)
    pool.play(60, *[BUSY] * 4)
    before = pool.target
    assert min(pool.play(120, None, None, None, None)) == before
    pool.policy = policy()
    idle = BUSY | {"utilisation": 0.0, "arrival_rate": 0.0, "running": 0.0}
    assert min(pool.play(110, *[idle] * 4)) == before  # downscale_window_s is 120
    assert pool.play(60, *[idle] * 4)[-1] < before


def test_replicas_that_start_count_as_what_is_to_come() -> None:
    """A queue stands for a minute while new replicas load: more are not asked for each time it is looked at."""
    pool = Pool(1, 1)
    pool.play(30, BUSY)
    pool.play(10, DOUBLED)
    asked = pool.target
    assert asked > 1
    assert max(pool.play(60, DOUBLED)) <= asked + 2

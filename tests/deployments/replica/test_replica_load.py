"""What a replica says of its load: rates over the window, and nothing where nothing is known."""

from __future__ import annotations

import pytest

from autoscaling.base import WINDOW_S, ReplicaSample
from deployments.replica.load import LoadMeter
from engine.types import EngineStats


def stats(**known: float | None) -> EngineStats:
    return EngineStats(**known)  # type: ignore[arg-type]


def test_before_the_first_update_nothing_is_known() -> None:
    assert LoadMeter(8, 1.0).sample() == {}


def test_an_idle_replica_knows_its_zeros_and_no_percentiles() -> None:
    meter = LoadMeter(8, 1.5)
    meter.update(0.0, stats(kv_blocks_total=10))
    said = meter.sample()
    assert set(said) < set(ReplicaSample._fields)
    assert said["backlog_s"] == said["utilisation"] == said["arrival_rate"] == said["waiting"] == 0.0
    assert said["startup_s"] == 1.5
    assert not {"ttft_p50_s", "ttft_p95_s", "itl_p95_s"} & set(said)


def test_utilisation_is_what_steps_took_beyond_their_fixed_part() -> None:
    meter = LoadMeter(8, 1.0)
    meter.update(0.0, stats())
    meter.update(5.0, stats(num_steps=100, step_s=3.0))
    assert "utilisation" not in meter.sample()  # steps, and none that shows their fixed part
    meter.update(10.0, stats(num_steps=100, step_s=3.0, shortest_step_s=0.01, num_arrived=40))
    assert meter.sample()["utilisation"] == pytest.approx((3.0 - 100 * 0.01) / WINDOW_S)
    assert meter.sample()["arrival_rate"] == pytest.approx(4.0)


def test_the_window_moves() -> None:
    meter = LoadMeter(8, 1.0)
    for second in range(31):
        busy = min(second, 15)
        meter.update(second, stats(num_steps=busy * 10, step_s=busy * 0.5, shortest_step_s=0.01, num_arrived=busy))
        if second == 15:
            assert meter.sample()["arrival_rate"] == pytest.approx(1.0)
            assert meter.sample()["utilisation"] == pytest.approx(0.4)
    assert meter.sample()["arrival_rate"] == meter.sample()["utilisation"] == 0.0


def test_backlog_is_pending_tokens_over_the_rate_seen() -> None:
    meter = LoadMeter(8, 1.0)
    meter.update(0.0, stats(pending_tokens=500))
    assert "backlog_s" not in meter.sample()  # a queue, and no rate yet
    meter.update(1.0, stats(pending_tokens=500, num_prompt_steps=10, prompt_step_s=1.0, prompt_step_tokens=1000))
    assert meter.sample()["backlog_s"] == pytest.approx(0.5)
    for second in range(2, 60):  # the rate falls to a tenth, and is learnt
        said = stats(
            pending_tokens=500,
            num_prompt_steps=10 * second,
            prompt_step_s=float(second),
            prompt_step_tokens=1000 + 100 * (second - 1),
        )
        meter.update(second, said)
    assert meter.sample()["backlog_s"] == pytest.approx(5.0, rel=0.05)
    meter.update(61.0, stats())
    assert meter.sample()["backlog_s"] == 0.0


def test_percentiles_are_of_the_window_alone() -> None:
    meter = LoadMeter(8, 1.0)
    meter.update(0.0, stats(), ttft_s=[9.0] * 20, itl_s=[0.5])
    meter.update(6.0, stats(), ttft_s=[0.1 * i for i in range(1, 11)])
    assert meter.sample()["ttft_p95_s"] == 9.0
    meter.update(12.0, stats())
    said = meter.sample()
    assert said["ttft_p50_s"] == pytest.approx(0.6) and said["ttft_p95_s"] == pytest.approx(1.0)
    assert "itl_p95_s" not in said
    meter.update(30.0, stats())
    assert "ttft_p50_s" not in meter.sample()

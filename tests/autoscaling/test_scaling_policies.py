"""Each policy on made-up signals, and all of them in small simulations."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_autoscaling import pool, sample

from autoscaling.base import POLICIES, Decision, ReplicaSample, ScalingPolicy, Signals, pool_signals
from autoscaling.demand import Growth, Level
from autoscaling.policies.ongoing import OngoingParams, OngoingRequests
from autoscaling.service_model import ServiceModel
from autoscaling.settings import PolicyError
from autoscaling.simulator.run import Outcome, Setup, fair_start, simulate
from autoscaling.spec import PolicySpec
from autoscaling.traces.trace import Trace

ALL: dict[str, dict[str, Any]] = {
    "slo": {},
    "queue_depth": {},
    "ongoing": {"target_ongoing_requests": 8},
    "schedule": {"entries": [{"cron": "0 8 * * *", "replicas": 3}], "otherwise": 1},
    "predictive": {},
    "composite": {"policies": [{"policy": "slo"}, {"policy": "schedule", "params": {"otherwise": 2}}]},
}


def policy(name: str, **params: Any) -> ScalingPolicy:
    kind = POLICIES.get(name)
    return kind.build(kind.Params.from_dict({**ALL[name], **params}, name))


def settle(p: ScalingPolicy, signals: Callable[[float], Signals], seconds: int = 120, start_s: int = 0) -> float:
    return [p.decide(signals(float(t)), float(t)).replicas for t in range(start_s, start_s + seconds)][-1]


def test_every_policy_has_its_row_here() -> None:
    assert set(ALL) == set(POLICIES.names())


@pytest.mark.parametrize("name", [n for n in ALL if n not in ("schedule", "composite")])
def test_what_is_not_known_is_not_zero(name: str) -> None:
    """Four replicas at work of which nothing is heard: no policy takes that for idleness."""
    p = policy(name)
    mute = ReplicaSample(0.0)
    unknown = pool_signals([mute] * 4, 0.0, serving=4, starting=0, target=4)
    proposal = p.decide(unknown, 0.0)
    assert proposal.replicas == 4 and proposal.hold


@pytest.mark.parametrize("name", [n for n in ALL if n != "schedule"])
def test_a_request_without_any_replica_asks_for_one(name: str) -> None:
    waiting = pool_signals([], 0.0, serving=0, starting=0, target=0, queued=1)
    assert policy(name).decide(waiting, 0.0).replicas >= 1


def test_a_silent_replica_counts_as_the_others() -> None:
    samples = [sample(0.0, arrival_rate=6.0), sample(0.0, arrival_rate=6.0), sample(0.0, arrival_rate=6.0)]
    known = pool_signals(samples, 1.0, serving=4, starting=0, target=4, silent=1)
    assert known.arrival_rate == pytest.approx(24.0) and known.reporting == 3
    new = pool_signals(samples, 1.0, serving=4, starting=0, target=4)
    assert new.arrival_rate == pytest.approx(18.0)
    odd = pool_signals([*samples, sample(0.0, arrival_rate=math.nan)], 1.0, serving=4, starting=0, target=4)
    assert odd.arrival_rate == pytest.approx(18.0)


def test_slo_follows_work_backlog_kv_and_seats() -> None:
    assert settle(policy("slo"), lambda t: pool(4, t)) == pytest.approx(4 * 0.35 / 0.7, rel=0.1)
    assert settle(policy("slo"), lambda t: pool(4, t, utilisation=0.9, arrival_rate=12.0)) > 4
    queued = policy("slo").decide(pool(4, 0.0, backlog_s=5.0), 0.0)
    assert queued.why == "backlog" and queued.terms["clearing"] == pytest.approx(4 * 4.5 / 20)
    assert policy("slo").decide(pool(4, 0.0, kv_usage=0.95), 0.0).why == "kv"
    assert policy("slo").decide(pool(4, 0.0, seats_used=1.0), 0.0).why == "seats"
    assert policy("slo", itl_slo_s=0.01).decide(pool(4, 0.0), 0.0).replicas == pytest.approx(8)


def test_slo_corrects_by_the_ttft_within_limits_and_not_while_replicas_start() -> None:
    late = policy("slo")
    assert settle(late, lambda t: pool(4, t, ttft_p95_s=3.0), 600) == pytest.approx(2 / 0.75, rel=0.05)
    starting = policy("slo")
    assert settle(starting, lambda t: pool(4, t, 5, starting=1, ttft_p95_s=3.0), 600) == pytest.approx(2.0, rel=0.05)


def test_a_surge_is_seen_in_full_although_replicas_can_do_no_more() -> None:
    p = policy("slo")
    settle(p, lambda t: pool(2, t, utilisation=0.4, arrival_rate=10.0), 120)
    surge = settle(p, lambda t: pool(2, t, utilisation=0.95, arrival_rate=60.0, backlog_s=4.0), 5, 120)
    assert surge > 6 * 2 * 0.4 / 0.7


def test_a_level_follows_rises_at_once_and_noise_slowly() -> None:
    level = Level()
    rng = np.random.default_rng(0)
    steady = [level.update(count / 10, 10.0, t) for t, count in enumerate(rng.poisson(100, 300))]
    assert 9 < np.mean(steady) < 11.5
    assert level.update(30.0, 30.0, 300.0) == 30.0
    assert level.update(10.0, 10.0, 301.0) > 25.0


def test_growth_keeps_room_for_a_burst_it_knows_and_none_on_top_of_it() -> None:
    growth = Growth(3600.0, 0.98)
    rooms = {}
    for t in range(0, 3600, 5):
        demand = 3.0 if t % 600 < 100 else 1.0
        rooms[t] = growth.update(demand, 40.0, float(t))[1]
    assert rooms[1550] == pytest.approx(2.0)
    assert rooms[1850] == 0.0


def test_ongoing_is_rays_rule() -> None:
    """Against numbers worked out by hand from ray.serve.autoscaling_policy."""
    p = OngoingRequests(OngoingParams(target_ongoing_requests=2, upscale_delay_s=3, downscale_delay_s=5))

    def at(t: float, replicas: int, target: int, ongoing: float) -> float:
        return p.decide(pool(replicas, t, target, running=ongoing / replicas), t).replicas

    assert [at(t, 1, 1, 9) for t in range(4)] == [1, 1, 1, 5]  # ceil(9 / 2) after 3 s
    assert at(4, 1, 5, 9) == 5
    assert min(at(40.0 + t, 5, 5, 2) for t in range(42)) == 1  # the mean over 30 s, then the delay, then straight down
    none = pool_signals([], 90.0, serving=0, starting=0, target=0, queued=3)
    assert p.decide(none, 90.0).replicas == 1
    slow = OngoingRequests(OngoingParams(target_ongoing_requests=2, upscale_delay_s=0, downscaling_factor=0.1,
                                         downscale_delay_s=0))  # fmt: skip
    assert slow.decide(pool(5, 0.0, running=1.4), 0.0).replicas == 4  # the factor must not hold it up


def test_ongoing_against_ray_itself() -> None:
    pytest.importorskip("ray.serve")
    # Serve applies factors, delays and bounds itself, around every policy. Ray has no public name for that.
    from ray.serve.autoscaling_policy import _apply_default_params, replica_queue_length_autoscaling_policy
    from ray.serve.config import AutoscalingConfig, AutoscalingContext

    rng = np.random.default_rng(1)
    # A look-back shorter than the interval makes both see the newest value alone.
    ours = OngoingRequests(
        OngoingParams(target_ongoing_requests=3, look_back_period_s=0.5, upscale_delay_s=0, downscale_delay_s=0,
                      upscaling_factor=0.7, downscaling_factor=0.6)
    )  # fmt: skip
    config = AutoscalingConfig(
        min_replicas=0, max_replicas=1000, target_ongoing_requests=3, upscale_delay_s=0, downscale_delay_s=0,
        upscaling_factor=0.7, downscaling_factor=0.6,
    )  # fmt: skip
    previous = None
    for i, total in enumerate(rng.integers(0, 60, 200).tolist()):
        replicas, target = int(rng.integers(1, 12)), int(rng.integers(1, 12))
        got = ours.decide(pool(replicas, float(i), target, running=total / replicas), float(i)).replicas
        if previous is not None:  # the mean of a time-weighted half second is what held then: the value before
            fields: dict[str, Any] = dict.fromkeys(AutoscalingContext.__init__.__code__.co_varnames[1:])
            fields = {k: None for k in fields if k in _context_fields(AutoscalingContext)}
            fields |= {
                "deployment_name": "d", "app_name": "a",
                "current_num_replicas": replicas, "target_num_replicas": target, "config": config,
                "total_num_requests": previous, "policy_state": {},
            }  # fmt: skip
            ctx = AutoscalingContext(**fields)
            desired, _ = replica_queue_length_autoscaling_policy(ctx)
            expected, _ = _apply_default_params(desired, ctx, {})
            assert got == expected, (i, replicas, target, previous)
        previous = total


def _context_fields(kind: type) -> set[str]:
    import inspect

    return set(inspect.signature(kind.__init__).parameters) - {"self"}


def test_schedule_floors() -> None:
    p = policy("schedule", entries=[{"cron": "0 8 * * 1-5", "duration_s": 3600, "replicas": 5}], lead_s=120)
    monday_8 = 1_700_467_200.0  # 2023-11-20 08:00 UTC, a Monday
    at = {s: p.decide(pool(1), monday_8 + s).replicas for s in (-180, -60, 0, 3540, 3660)}
    assert at == {-180: 1, -60: 5, 0: 5, 3540: 5, 3660: 1}
    assert p.decide(pool(1), monday_8 - 2 * 86400).replicas == 1  # a Saturday


@pytest.mark.slow
def test_predictive_knows_the_last_season() -> None:
    p = policy("predictive", season_s=1200, bucket_s=60, refit_s=60)
    wished = {}
    for t in range(0, 4200, 10):
        busy = 600 <= t % 1200 < 900
        signals = pool(4, float(t), utilisation=0.9 if busy else 0.2, arrival_rate=10.0 if busy else 2.0)
        wished[t] = p.decide(signals, float(t))
    assert wished[540].replicas < 2  # the first time nobody knows
    assert wished[4150 - 10].replicas > 4 and wished[4140].why == "season"  # the fourth comes at 4200


def test_composite_takes_the_most_and_survives_a_member() -> None:
    p = policy("composite")
    idle = p.decide(pool(1, utilisation=0.0, arrival_rate=0.0, seats_used=0.0, kv_usage=0.0), 0.0)
    assert idle.replicas == 2 and idle.why == "schedule: schedule"
    assert p.decide(pool(4, utilisation=0.9), 0.0).why.startswith("slo: ")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": "sol"}, "unknown autoscaling policy 'sol'; known: slo, queue_depth"),
        ({"policy": "slo", "params": {"ttft_slo": 1}}, "x.params: unknown setting ttft_slo; known: ttft_slo_s"),
        ({"policy": "slo", "params": {"ttft_slo_s": 0}}, "x.params.ttft_slo_s: must be above 0, got 0"),
        (
            {"policy": "slo", "param": {}},
            "x: unknown setting param; known: policy, min_replicas, max_",
        ),
        ({"policy": "schedule", "params": {"entries": [{"cron": "8am"}]}}, r"entries\[0\].cron: must be five cron"),
        ({"policy": "schedule", "params": {"timezone": "Mars"}}, "timezone: must be an IANA name"),
        ({"policy": "composite", "params": {}}, "policies: must be a list of at least one"),
        ({"policy": "composite", "params": {"policies": [{"policy": "composite"}]}}, r"policies\[0\].policy: must be"),
        ({"policy": "predictive", "params": {"bucket_s": 1}}, "bucket_s: must split"),
        ("slo", "x: must be a mapping"),
    ],
)
def test_wrong_policies_name_the_field(given: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        PolicySpec.from_dict(given, "x")


def test_policies_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("policy: slo\nparams: {ttft_slo_s: 0.5}\nguardrails: {max_replicas: 3}\n")
    spec = PolicySpec.load(str(path), {"min_replicas": 2, "max_replicas": 9})
    assert (spec.label, spec.guardrails.min_replicas, spec.guardrails.max_replicas) == ("mine", 2, 3)
    with pytest.raises(PolicyError, match="No such file"):
        PolicySpec.load(str(tmp_path / "absent.yaml"))
    path.write_text("a: [")
    with pytest.raises(PolicyError, match="not YAML"):
        PolicySpec.load(str(path))


# In small simulations.

SLOW = ServiceModel(  # one 1 s request at a time
    base_s=1.0, prefill_token_s=1e-9, decode_seq_s=0.0, max_num_seqs=1, kv_tokens=1000, startup_s=3.0
)
SMALL = ServiceModel(
    base_s=0.005, prefill_token_s=2e-4, decode_seq_s=2e-4, max_num_seqs=64, kv_tokens=100_000, startup_s=5.0
)


def steady(rate: float, duration_s: float, prompt: int = 300, output: int = 20, start_s: float = 0.0) -> Trace:
    at = np.arange(start_s, start_s + duration_s, 1 / rate)
    return Trace("steady", at, np.full(len(at), prompt), np.full(len(at), output), start_s + duration_s)


def outcome(name: str, trace: Trace, model: ServiceModel = SMALL, **guardrails: Any) -> Outcome:
    rails = {"max_replicas": 10, **guardrails}
    spec = PolicySpec.from_dict({"policy": name, "params": ALL[name], "guardrails": rails}, name)
    initial = max(1, rails.get("min_replicas", 1))
    return simulate(trace, spec.controller(), Setup(model, initial_replicas=initial))


def directions(events: tuple[tuple[float, Decision], ...], start: int, since_s: float = 0.0) -> list[int]:
    targets = [start, *(d.target for _, d in events)]
    times = [at for at, _ in events]
    return [int(np.sign(b - a)) for a, b, at in zip(targets, targets[1:], times, strict=False) if at >= since_s]


@pytest.mark.parametrize("name", ["slo", "predictive", "composite"])
def test_a_step_of_load_is_met_and_left_again_without_flapping(name: str) -> None:
    """Quiet, then ten times the load, then quiet: the queue is gone in the end, at most one reversal, all answered."""
    quiet, busy, after = steady(2, 60), steady(25, 240, start_s=60), steady(2, 600, start_s=300)
    parts = (quiet, busy, after)
    trace = Trace(
        "step",
        np.concatenate([t.at_s for t in parts]),
        np.concatenate([t.prompt_tokens for t in parts]),
        np.concatenate([t.output_tokens for t in parts]),
        900.0,
    )
    got = outcome(name, trace, downscale_window_s=120)
    assert not np.isnan(got.ttft_s).any() and got.rejected == 0 and got.faults == 0
    assert got.timeline.target.max() > 2
    moves = directions(got.events, 1)
    assert sum(a != b for a, b in pairwise(moves)) <= 1, moves
    assert got.timeline.target[899] <= 2
    late = (trace.at_s > 200) & (trace.at_s < 300)
    assert np.quantile(got.ttft_s[late], 0.95) < 1.0
    first_up = next(at for at, d in got.events if d.target > 1)
    assert first_up < 75


def test_start_ups_that_are_known_are_taken_in_turn() -> None:
    trace = steady(25, 120)
    spec = PolicySpec.from_dict({"policy": "schedule", "params": {"otherwise": 4}}, "four")
    got = simulate(trace, spec.controller(), Setup(SMALL, startups_s=(50.0, 7.0), seed=3))
    at_s, serving = got.timeline.at_s, got.timeline.serving
    came = [float(at_s[np.argmax(serving >= n)] - at_s[0]) for n in (2, 3, 4)]
    assert came == pytest.approx(sorted([50.0, 7.0, SMALL.startup_s]), abs=1.0)


@pytest.mark.parametrize("name", ["slo", "queue_depth"])
def test_peer_case_up_then_at_once_down(name: str) -> None:
    """One replica that serves one request of a second at a time, five a second: five to eight, and it stays there."""
    got = outcome(name, steady(5, 120, prompt=10, output=1), SLOW)
    assert not np.isnan(got.ttft_s).any() and len(got.ttft_s) == 600
    assert 5 <= got.timeline.target[119] <= 10
    assert len(directions(got.events, 1, since_s=60.0)) <= 4
    assert all(d >= 0 for d in directions(got.events, 1))  # never down under that load


@pytest.mark.parametrize("name", sorted(ALL))
def test_nothing_to_do_goes_to_the_minimum(name: str) -> None:
    trace = steady(0.2, 1500, prompt=10, output=2)
    got = outcome(name, trace, min_replicas=1, max_replicas=6)
    assert got.timeline.target[-1] <= 2


def test_a_simulation_is_the_same_twice() -> None:
    trace = steady(20, 120)
    a, b = outcome("slo", trace), outcome("slo", trace)
    assert a.ttft_s.tobytes() == b.ttft_s.tobytes() and a.events == b.events


def test_replica_hours_are_of_what_was_up() -> None:
    spec = PolicySpec.from_dict({"policy": "schedule", "params": {"otherwise": 3}}, "s")
    trace = steady(1, 100)
    got = simulate(trace, spec.controller(), Setup(SMALL, initial_replicas=3))
    assert got.replica_s == pytest.approx(300.0)
    assert fair_start(trace, SMALL) == 1

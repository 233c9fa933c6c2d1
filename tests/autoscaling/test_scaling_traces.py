"""Traffic: recorded, made up, scaled; and service models fitted to measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoscaling.fit import Step, bench_steps, fit, fit_contention, fit_file
from autoscaling.service_model import ServiceModel
from autoscaling.settings import PolicyError
from autoscaling.simulator.cluster import Cluster
from autoscaling.simulator.run import Setup, simulate
from autoscaling.spec import PolicySpec
from autoscaling.traces.formats import TraceError
from autoscaling.traces.generators import GENERATORS, generate
from autoscaling.traces.trace import Trace, fit_limits, load_trace, scale_rate, speed_up

TRACES = Path(__file__).parent.parent / "data" / "traces"


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_generated_traffic(name: str) -> None:
    trace = generate(name, 20.0, 3600.0, 7)
    again = generate(name, 20.0, 3600.0, 7)
    assert trace.at_s.tobytes() == again.at_s.tobytes()
    assert trace.prompt_tokens.tobytes() == again.prompt_tokens.tobytes()
    assert len(trace) == pytest.approx(20 * 3600, rel=0.02)
    assert (np.diff(trace.at_s) >= 0).all() and trace.at_s[0] >= 0 and trace.at_s[-1] < 3600
    assert trace.prompt_tokens.min() >= 1 and trace.output_tokens.min() >= 1
    assert generate(name, 20.0, 3600.0, 8).at_s.tobytes() != trace.at_s.tobytes()


@pytest.mark.parametrize(
    ("name", "least", "most"), [("constant", 0.9, 1.1), ("burst", 2.0, 4.0), ("flash_crowd", 2.5, 7.0)]
)
def test_shapes(name: str, least: float, most: float) -> None:
    per_minute = np.bincount((generate(name, 50.0, 7200.0, 0).at_s // 60).astype(int))
    assert least <= per_minute.max() / np.median(per_minute) <= most


def test_a_request_log_is_a_trace(tmp_path: Path) -> None:
    """Lines are of ends; refusals and what the prefix cache had do not count as work."""
    rows: list[dict[str, Any]] = [
        {"time": 105.0, "total_s": 4.0, "prompt_tokens": 100, "cached_tokens": 64, "completion_tokens": 20},
        {"time": 103.0, "total_s": 3.0, "prompt_tokens": 50, "cached_tokens": 0, "completion_tokens": 5},
        {"time": 104.0, "total_s": 0.1, "prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0},
    ]
    path = tmp_path / "requests_x.log"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = load_trace(path)
    assert trace.at_s.tolist() == [0.0, 1.0]
    assert trace.prompt_tokens.tolist() == [50, 36] and trace.output_tokens.tolist() == [5, 20]


@pytest.mark.parametrize(("name", "num"), [("azure.csv", 4), ("burstgpt.csv", 3), ("mooncake.jsonl", 3)])
def test_public_formats(name: str, num: int) -> None:
    assert len(load_trace(TRACES / name)) == num


def test_scaling() -> None:
    trace = generate("burst", 5.0, 1800.0, 0)
    for factor in (0.3, 1.0, 2.5):
        scaled = scale_rate(trace, factor, 3)
        assert len(scaled) == pytest.approx(factor * len(trace), rel=0.05)
        assert (np.diff(scaled.at_s) >= 0).all() and scaled.at_s[-1] < trace.duration_s
        assert scaled.prompt_tokens.mean() == pytest.approx(trace.prompt_tokens.mean(), rel=0.1)
        assert scaled.notes[-1] == f"{factor:g} times the requests"
    fast = speed_up(trace, 4.0)
    assert fast.duration_s == 450.0 and len(fast) == len(trace) and fast.notes[-1] == "played 4 times as fast"
    with pytest.raises(TraceError, match="leaves no requests"):
        scale_rate(trace, 1e-9, 0)
    short = fit_limits(trace, 600)
    assert (short.prompt_tokens + short.output_tokens).max() <= 600 and "left out" in short.notes[-1]
    with pytest.raises(TraceError, match="every request needs more"):
        fit_limits(trace, 1)


def test_unknown_names_list_the_generators() -> None:
    with pytest.raises(PolicyError, match="no file and no generator is called 'burts'; generators: constant, diurnal"):
        generate("burts", 1.0, 60.0, 0)


# Fitting.

MODEL = ServiceModel(
    base_s=0.004, prefill_token_s=8e-4, prefill_pair_s=3e-8, decode_seq_s=1.2e-3, decode_context_s=2e-6
)


def close(found: ServiceModel, wanted: ServiceModel, rel: float) -> None:
    for name in ("base_s", "prefill_token_s", "decode_seq_s", "decode_context_s"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=rel), name


@pytest.mark.slow
def test_fit_finds_the_model_that_made_a_benchmark(tmp_path: Path) -> None:
    decode = [
        {"batch": b, "context": c, "step_ms": 1e3 * MODEL.step_s(0, 0, b, b * c)}
        for b in (1, 8, 32)
        for c in (128, 4096)
    ]
    prefill = [
        {"chunk": n, "context": c, "ms": 1e3 * MODEL.step_s(n, n * (c + n / 2), 0, 0)}
        for n in (64, 512)
        for c in (0, 4096)
    ]
    decode.append({"batch": 64, "context": 4096})  # did not fit the cache
    path = tmp_path / "engine_bench.json"
    path.write_text(json.dumps({"settings": {}, "tables": {"decode": {"rows": decode}, "prefill": {"rows": prefill}}}))
    found = fit_file(path, ServiceModel(startup_s=12.0, max_num_seqs=7))
    assert found.num == 10 and found.error < 0.001 and found.worst < 0.001
    close(found.model, MODEL, 0.001)
    assert (found.model.startup_s, found.model.max_num_seqs) == (12.0, 7)
    assert len(list(bench_steps({"tables": {}}))) == 0


def _trace() -> Trace:
    trace = generate("constant", 1.0, 600.0, 0)
    return Trace("t", trace.at_s, trace.prompt_tokens // 4 + 1, trace.output_tokens // 2 + 3, 600.0)


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_fit_finds_about_the_model_that_made_a_request_log(tmp_path: Path) -> None:
    """The simulated engine's own requests: others at work at the time are told from the log alone."""
    found = fit_file(_write(tmp_path / "requests_x.log", _served(_trace())), MODEL)
    assert found.error < 0.25
    for tokens, batch in ((256, 0), (0, 4), (256, 8)):
        args = (tokens, 0.0, batch, batch * 150)
        assert found.model.step_s(*args) == pytest.approx(MODEL.step_s(*args), rel=0.35)


def test_fit_of_requests_one_by_one_knows_what_long_prompts_cost(tmp_path: Path) -> None:
    """Eight short ones of which the log says nonsense change nothing."""
    model = replace(MODEL, prefill_pair_s=1e-6)
    at_s = np.arange(40.0) * 10
    trace = Trace("t", at_s, np.tile([32, 128, 512, 2000], 10), np.full(40, 20), 400.0)
    rows = _served(trace, model)
    rows += [row | {"prefill_s": 5 * row["prefill_s"], "time": row["time"] + 1000.0} for row in rows[::5]]
    found = fit_file(_write(tmp_path / "requests_x.log", rows), replace(model, prefill_pair_s=0.0)).model
    assert found.prefill_pair_s == pytest.approx(1e-6, rel=0.02)
    assert found.prefill_token_s == pytest.approx(model.prefill_token_s, rel=0.02)


def test_contention_is_how_much_longer_the_same_takes_beside_another(tmp_path: Path) -> None:
    rows = _served(_trace())
    alone = fit_file(_write(tmp_path / "alone.log", rows), MODEL).model
    assert (alone.contention, alone.replicas_per_host) == (0.0, 1)
    slower = [row | {name: 1.3 * row[name] for name in ("time", "prefill_s", "decode_s")} for row in rows]
    beside = _write(tmp_path / "beside.log", slower)
    found = fit_contention(beside, alone)
    assert found.model.contention == pytest.approx(0.3, abs=0.1) and found.model.replicas_per_host == 2
    assert replace(found.model, contention=0.0, replicas_per_host=1, about="") == replace(alone, about="")
    quicker = [row | {name: 0.5 * row[name] for name in ("time", "prefill_s", "decode_s")} for row in rows]
    assert fit_contention(_write(tmp_path / "quicker.log", quicker), alone).model.contention == 0.0
    assert fit_contention(beside, replace(alone, replicas_per_host=4)).model.replicas_per_host == 4
    with pytest.raises(PolicyError, match="no usable measurements"):
        fit_contention(_write(tmp_path / "none.log", []), alone)


def test_a_log_of_several_models_is_fitted_for_one(tmp_path: Path) -> None:
    rows = _served(_trace())
    path = _write(tmp_path / "requests_x.log", [row | {"model": "a"} for row in rows] + [rows[0] | {"model": "b"}])
    with pytest.raises(PolicyError, match="several models: a, b; choose one with --model"):
        fit_file(path, MODEL)
    with pytest.raises(PolicyError, match="no requests to 'c'; there are some to a, b"):
        fit_file(path, MODEL, "c")
    only = _write(tmp_path / "requests_y.log", rows)
    assert replace(fit_file(path, MODEL, "a").model, about="") == replace(fit_file(only, MODEL).model, about="")


def _served(trace: Trace, model: ServiceModel = MODEL) -> list[dict[str, Any]]:
    cluster = Cluster(model, trace, "least_loaded", 0)
    cluster.start(0.0, 0.0)
    cluster.advance(2000.0)
    rows = []
    for i, at_s in enumerate(trace.at_s.tolist()):
        first_s, end_s = at_s + float(cluster.ttft_s[i]), float(cluster.finish_s[i])
        rows.append(
            {
                "time": end_s, "total_s": end_s - at_s, "prompt_tokens": int(trace.prompt_tokens[i]),
                "cached_tokens": 0, "completion_tokens": int(trace.output_tokens[i]),
                "prefill_s": first_s - at_s, "decode_s": end_s - first_s,
            }
        )  # fmt: skip
    return rows


def test_what_cannot_be_fitted(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="0 usable measurements are too few"):
        fit([], MODEL, "x")
    with pytest.raises(PolicyError, match="x: 1 usable measurements are too few to fit 2"):
        fit([Step(1.0, {"base_s": 1.0, "decode_seq_s": 2.0})], MODEL, "x")
    path = tmp_path / "f"
    path.write_text("hello")
    with pytest.raises(PolicyError, match="neither engine_bench's JSON nor a request log"):
        fit_file(path, MODEL)
    with pytest.raises(PolicyError, match="No such file"):
        fit_file(tmp_path / "absent", MODEL)


def test_profiles(tmp_path: Path) -> None:
    for name in ("cpu-demo", "gpu-example"):
        ServiceModel.load(name)
    MODEL.save(tmp_path / "m.json")
    assert ServiceModel.load(str(tmp_path / "m.json")) == MODEL
    with pytest.raises(PolicyError, match=r"shipped: cpu-demo, gpu-example, or a \.json file"):
        ServiceModel.load("tpu")
    (tmp_path / "m.json").write_text('{"base_s": -1}')
    with pytest.raises(PolicyError, match="base_s: must be above 0"):
        ServiceModel.load(str(tmp_path / "m.json"))


@pytest.mark.slow
def test_slo_beats_the_baseline_at_equal_cost_on_generated_traffic() -> None:
    from autoscaling.comparison import compare

    model = ServiceModel.load("gpu-example")
    trace = generate("burst", 40.0, 2400.0, 5)
    policy = PolicySpec.load("slo", {"max_replicas": 24})
    result = compare(
        policy, PolicySpec.load("ongoing", {"max_replicas": 24}), trace, Setup(model, initial_replicas=3), 1.0
    )
    assert result.policy.slo_attainment > result.same_hours.slo_attainment + 0.03
    assert result.policy.faults == 0 and result.policy.rejected == 0
    assert result.policy.slo_attainment <= result.most.slo_attainment <= result.reachable == 1.0
    schedule = PolicySpec.from_dict({"policy": "schedule", "params": {"otherwise": 2}}, "two")
    assert simulate(trace, schedule.controller(), Setup(model)).timeline.target[-1] == 2

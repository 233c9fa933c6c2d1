"""The parts of the simulator's validation that need no server."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from autoscaling.traces.formats import read_trace
from autoscaling.traces.trace import load_trace
from load_tests.autoscale.real import startups_of, wanted_at
from load_tests.autoscale.traffic import make_trace, within, write_trace
from load_tests.autoscale.validate import POLICY, PROFILE, ScalingFigures, TraceComparison, markdown, median, predict
from load_tests.errors import LoadError


def test_both_sides_read_the_same_requests(tmp_path: Path) -> None:
    trace = within(make_trace("burst", 60.0, 4.0, 0), 1000, 200)
    assert len(trace) == pytest.approx(240, rel=0.3) and trace.duration_s == pytest.approx(60.0)
    assert trace.prompt_tokens.max() <= 1000 and trace.output_tokens.max() <= 200
    file = tmp_path / "t.csv"
    write_trace(trace, file)
    again = load_trace(file)
    assert np.allclose(again.at_s, trace.at_s - trace.at_s[0], atol=1e-5)
    assert (again.prompt_tokens == trace.prompt_tokens).all() and (again.output_tokens == trace.output_tokens).all()


def test_a_recorded_file_is_cut_and_stretched(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    write_trace(make_trace("constant", 100.0, 5.0, 0), file)
    trace = make_trace(str(file), 20.0, 10.0, 0)
    assert len(trace) == 200 and trace.duration_s == pytest.approx(20.0)
    assert len(read_trace(file)) > 200
    with pytest.raises(LoadError, match="No such file"):
        make_trace(str(tmp_path / "none.csv"), 20.0, 10.0, 0)


def test_the_prediction_is_the_same_for_the_same_seed_and_told_the_delays() -> None:
    trace = within(make_trace("burst", 60.0, 3.0, 0), 1000, 100)
    said, late = predict(trace, 0.01, 4.0), predict(trace, 0.51, 4.0)
    assert said == predict(trace, 0.01, 4.0) and len(set(said)) > 1
    assert median(late).ttft_p50_s == pytest.approx(median(said).ttft_p50_s + 0.5)
    assert 0 < median(said).ttft_p50_s < 1 and median(said).mean_replicas >= 1


def test_the_settings_are_those_of_the_real_side() -> None:
    from deployments.config.application import ServeConfig
    from load_tests.autoscale.real import serve_config

    [app] = serve_config(PROFILE, POLICY, 8290)["applications"]
    [model] = ServeConfig.model_validate(app["args"]).models
    assert model.autoscaling is not None and model.autoscaling.policy == POLICY["policy"]
    assert model.engine.executor_options["base_s"] == PROFILE["base_s"]


def test_a_replica_costs_from_the_decision_on() -> None:
    decisions = [{"time": 5.0, "to": 1}, {"time": 10.0, "to": 3}, {"time": 20.0, "to": 2}]
    assert [wanted_at(decisions, at_s) for at_s in (0.0, 9.9, 10.0, 25.0)] == [1, 1, 3, 2]


def test_start_ups_are_those_after_the_first(tmp_path: Path) -> None:
    said = (
        "Replica(id='a', deployment='{}', app='s') started successfully on node 'n' after {}s (PID: 1). It took 0.0s."
    )
    names = ("Gateway", "ModelReplica-paced", "ModelReplica-paced", "ModelReplica-paced")
    lines = [json.dumps({"message": said.format(name, i)}) for i, name in enumerate(names)]
    assert startups_of(tmp_path) == []
    (tmp_path / "controller_7.log").write_text("\n".join(lines))
    assert startups_of(tmp_path) == pytest.approx([2.5, 3.5], abs=0.5)


def figures(ttft_s: float, replicas: int) -> ScalingFigures:
    return ScalingFigures(ttft_s, 2 * ttft_s, 0.99, replicas - 0.5, replicas, 4)


def test_close_is_within_a_fifth_in_everything() -> None:
    made = {"notes": (), "requests": 9, "failed": 0, "overhead_s": 0.0, "startup_s": 4.0, "server_cpu": 0.5}
    real = (figures(0.45, 3), figures(0.55, 3))
    near = TraceComparison(trace="a", real=real, predicted=(figures(0.55, 3),), **made)  # type: ignore[arg-type]
    far = TraceComparison(trace="b", real=real, predicted=(figures(0.5, 4),), **made)  # type: ignore[arg-type]
    assert near.close and not far.close
    assert near.off["ttft_p50_s"] == pytest.approx(0.1)
    table = markdown([near, far]).splitlines()
    assert len(table) == 2 + 3 * 2 and "+10%" in table[4] and "+33%" in table[7]
    assert "real, 2 runs | 0.500 s (0.450 to 0.550)" in table[2] and "| 0.550 s |" in table[3]
    assert near.as_dict()["close"] is True and near.as_dict()["real_median"]["ttft_p50_s"] == pytest.approx(0.5)

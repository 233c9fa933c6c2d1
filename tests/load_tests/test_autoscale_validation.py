"""The parts of the simulator's validation that need no server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autoscaling.traces.trace import load_trace
from load_tests.autoscale.real import Measured
from load_tests.autoscale.traffic import make_trace, within, write_trace
from load_tests.autoscale.validate import POLICY, PROFILE, Comparison, Figures, markdown, predict
from load_tests.errors import LoadError
from load_tests.traces import read_trace


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


def test_the_prediction_is_the_commands(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    write_trace(within(make_trace("constant", 60.0, 1.0, 0), 1000, 100), file)
    said = predict(file, Measured([0.1], [], [1], 0.01, None, [], 0.0), tmp_path)
    assert said["requests"] == len(load_trace(file)) and said["peak_replicas"] >= 1
    assert 0 < said["ttft_p50_s"] < 1 and said["replica_hours"] > 0


def test_the_settings_are_those_of_the_real_side() -> None:
    from deployments.config import ServeConfig
    from load_tests.autoscale.real import _config

    [app] = _config(PROFILE, POLICY, 8290)["applications"]
    [model] = ServeConfig.model_validate(app["args"]).models
    assert model.autoscaling is not None and model.autoscaling.policy == POLICY["policy"]
    assert model.engine.stand_in_times is not None and model.engine.stand_in_times.base_s == PROFILE["base_s"]


def figures(ttft_s: float, replicas: int) -> Figures:
    return Figures(ttft_s, 2 * ttft_s, 0.99, replicas - 0.5, replicas, 4)


def test_close_is_within_a_fifth_in_everything() -> None:
    made = {"notes": (), "requests": 9, "failed": 0, "overhead_s": 0.0, "startup_s": None, "server_cpu": 0.5}
    near = Comparison(trace="a", real=figures(0.5, 3), predicted=figures(0.55, 3), **made)  # type: ignore[arg-type]
    far = Comparison(trace="b", real=figures(0.5, 3), predicted=figures(0.5, 4), **made)  # type: ignore[arg-type]
    assert near.close and not far.close
    assert near.off["ttft_p50_s"] == pytest.approx(0.1)
    table = markdown([near, far]).splitlines()
    assert len(table) == 2 + 3 * 2 and "+10%" in table[4] and "+33%" in table[7]
    assert near.as_dict()["close"] is True

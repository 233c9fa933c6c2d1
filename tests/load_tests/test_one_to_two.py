"""The parts of the run with the real engine that need no server."""

from __future__ import annotations

import json

import numpy as np
import pytest

from load_tests.autoscale.one_to_two import ENGINE, POLICY, compared, split, step_trace
from load_tests.autoscale.real import Measured, serve_config
from load_tests.errors import LoadError

PROFILE = {
    "base_s": 0.006, "prefill_token_s": 0.002, "prefill_pair_s": 0.0, "decode_seq_s": 0.003, "decode_context_s": 1e-7,
}  # fmt: skip


def test_the_load_steps_from_little_to_more_than_one_replica_takes() -> None:
    trace = step_trace(PROFILE, 60.0, 0)
    early = int(np.count_nonzero(trace.at_s < 10.0))
    assert 0 < early / 10.0 < (len(trace) - early) / 50.0
    work_s = trace.prompt_tokens.sum() * 0.002 + trace.output_tokens.sum() * (0.003 + 0.006 / 4)
    assert 50.0 < work_s < 110.0  # more than one replica, less than two
    assert (np.diff(trace.at_s) >= 0).all() and trace.prompt_tokens.max() <= 512 and trace.output_tokens.max() <= 64
    same, other = step_trace(PROFILE, 60.0, 0), step_trace(PROFILE, 60.0, 1)
    assert (same.at_s == trace.at_s).all() and len(other.at_s) and other.at_s[0] != trace.at_s[0]
    with pytest.raises(LoadError, match="too few"):
        step_trace(PROFILE | {"base_s": 1e6}, 11.0, 0)


def test_a_log_is_split_by_when_its_requests_came() -> None:
    rows = [("a", 5.0, 1.0), ("b", 5.0, 1.0), ("a", 11.0, 2.0), ("a", 12.0, 1.5), ("b", 12.0, 1.0)]
    lines = [json.dumps({"model": model, "time": time_s, "total_s": took_s}) for model, time_s, took_s in rows]
    assert split(lines, "a", 10.0) == ([lines[0], lines[2]], [lines[3]])


def test_each_run_is_predicted_with_the_start_that_it_had() -> None:
    trace = step_trace(PROFILE, 20.0, 0)
    runs = [Measured([0.4, 0.6], [], [1, 2], 0.01, startups_s, [], 10.0) for startups_s in ([2.0], [6.0], [])]
    known = {**PROFILE, "max_num_batched_tokens": 256, "max_num_seqs": 16, "kv_tokens": 16_000}
    found = compared(trace, trace, known, runs)
    assert len(found.real) == 3 and found.startup_s == pytest.approx((2.0 + 6.0 + POLICY["params"]["startup_s"]) / 3)
    each = len(found.predicted) // 3
    soon, late = found.predicted[0], found.predicted[each]
    assert soon.ttft_p95_s < late.ttft_p95_s
    crowded = compared(trace, trace, {**known, "contention": 0.5, "replicas_per_host": 2}, runs[:1])
    assert crowded.predicted[0].ttft_p95_s > soon.ttft_p95_s


def test_the_server_runs_the_model_itself_with_and_without_a_policy() -> None:
    from deployments.config.application import ServeConfig

    for policy in (POLICY, None):
        [app] = serve_config({}, policy, 8289, ENGINE)["applications"]
        [model] = ServeConfig.model_validate(app["args"]).models
        assert model.engine.executor == "local" and model.engine.num_threads == 1
        assert model.most_replicas == (1 if policy is None else 2)

"""The parts of the run with the real engine that need no server."""

from __future__ import annotations

import numpy as np
import pytest

from load_tests.autoscale.one_to_two import ENGINE, POLICY, step_trace
from load_tests.autoscale.real import serve_config
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


def test_the_server_runs_the_model_itself_with_and_without_a_policy() -> None:
    from deployments.config import ServeConfig

    for policy in (POLICY, None):
        [app] = serve_config({}, policy, 8289, ENGINE)["applications"]
        [model] = ServeConfig.model_validate(app["args"]).models
        assert model.engine.executor != "stand_in" and model.engine.num_threads == 1
        assert model.most_replicas == (1 if policy is None else 2)

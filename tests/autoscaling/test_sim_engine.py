"""The simulated replicas, checked by hand, and held to the bits of the same model in Python."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers_replicas import ReferenceCluster
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.service_model import ServiceModel
from autoscaling.simulator.cluster import ROUTERS, Cluster, library
from autoscaling.traces.trace import Trace

MODEL = ServiceModel(
    base_s=0.01,
    prefill_token_s=0.001,
    prefill_pair_s=1e-6,
    decode_seq_s=0.002,
    decode_context_s=1e-5,
    overhead_s=0.005,
    max_num_batched_tokens=64,
    max_num_seqs=4,
    kv_tokens=400,
    max_num_waiting=6,
)


def trace(*requests: tuple[float, int, int]) -> Trace:
    at, prompt, output = zip(*requests, strict=True)
    return Trace("t", np.array(at, float), np.array(prompt), np.array(output), max(at) + 1.0)


def served(model: ServiceModel, t: Trace, until_s: float = 100.0) -> Cluster:
    cluster = Cluster(model, t, "least_loaded", 0)
    cluster.start(0.0, 0.0)
    cluster.advance(until_s)
    return cluster


def test_one_request_takes_its_steps() -> None:
    """Two chunks of the prompt, the second with the pairs of the first, then a decode for each further token."""
    cluster = served(MODEL, trace((1.0, 100, 3)))
    first = MODEL.step_s(64, 64 * 32, 0, 0) + MODEL.step_s(36, 36 * (64 + 18), 0, 0)
    assert cluster.ttft_s[0] == pytest.approx(first + 0.005)
    decodes = MODEL.step_s(0, 0, 1, 100) + MODEL.step_s(0, 0, 1, 101)
    assert cluster.finish_s[0] == pytest.approx(1.0 + first + decodes)


def test_nothing_is_faster_than_alone() -> None:
    prompts = np.array([1, 64, 65, 200])
    alone_s = [served(MODEL, trace((1.0, int(p), 1))).ttft_s[0] for p in prompts]
    assert MODEL.alone_s(prompts) == pytest.approx(alone_s)


def test_a_gateway_counts_a_prompt_until_its_first_token() -> None:
    """The long prompt is nearly computed when the last one comes, and still weighs all it did: that one joins the two
    short ones that decode."""
    model = dataclasses.replace(MODEL, kv_tokens=4000, max_num_seqs=8)
    t = trace((0.0, 10, 200), (0.0, 600, 1), (0.1, 10, 200), (0.75, 10, 1))
    cluster = Cluster(model, t, "least_loaded", 0)
    for _ in range(2):
        cluster.start(0.0, 0.0)
    cluster.advance(0.75)
    assert {(s.running or 0) + (s.waiting or 0) for s in cluster.samples(0.75)} == {1, 3}


def test_an_arrival_waits_for_the_step_in_progress_and_shares_the_next() -> None:
    cluster = served(MODEL, trace((0.0, 10, 5), (0.001, 20, 1)))
    first = MODEL.step_s(10, 50, 0, 0)
    assert cluster.ttft_s[0] == pytest.approx(first + 0.005)
    assert cluster.ttft_s[1] == pytest.approx(first - 0.001 + MODEL.step_s(20, 200, 1, 10) + 0.005)


def test_seats_bound_the_batch() -> None:
    model = dataclasses.replace(MODEL, max_num_seqs=1)
    cluster = served(model, trace((0.0, 10, 5), (0.001, 10, 1)))
    assert cluster.ttft_s[1] + 0.001 - 0.005 > cluster.finish_s[0]


def test_full_kv_sends_the_youngest_back_and_all_end() -> None:
    model = dataclasses.replace(MODEL, kv_tokens=130)
    cluster = served(model, trace((0.0, 30, 60), (0.001, 30, 60)))
    assert not np.isnan(cluster.finish_s).any()
    assert cluster.finish_s[0] < cluster.finish_s[1]
    assert cluster.counts().open == 0


def test_a_full_queue_refuses_and_a_draining_replica_finishes() -> None:
    cluster = served(MODEL, trace(*[(0.0, 50, 20)] * 20), until_s=0.0)
    assert cluster.counts().rejected == 13  # one runs, six wait
    assert cluster.stop(0.0) and not cluster.stop(0.0)
    assert cluster.counts().draining == 1
    cluster.advance(100.0)
    assert cluster.counts().open == 0
    (lifetime,) = cluster.lifetimes()
    assert lifetime[1] == pytest.approx(np.nanmax(cluster.finish_s))


def test_requests_wait_for_the_first_replica() -> None:
    cluster = Cluster(MODEL, trace((0.0, 10, 1), (1.0, 10, 1)), "least_loaded", 0)
    cluster.advance(1.0)
    assert cluster.counts().queued == 2
    cluster.start(1.0, 5.0)
    cluster.advance(10.0)
    step = MODEL.step_s(10, 50, 0, 0)
    assert cluster.ttft_s == pytest.approx([5.0 + step + 0.005, 4.0 + 2 * step + 0.005])


REQUESTS = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=60).map(
    sorted
)
ACTIONS = st.lists(st.tuples(st.sampled_from(["start", "stop"]), st.floats(0.01, 1.0)), max_size=8)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(REQUESTS, ACTIONS, st.sampled_from(ROUTERS), st.integers(0, 2**64 - 1), st.integers(260, 600), st.integers(1, 3))
def test_both_models_give_the_same_bits(
    requests: list[tuple[float, int, int]],
    actions: list[tuple[str, float]],
    router: str,
    seed: int,
    kv: int,
    per_host: int,
) -> None:
    model = dataclasses.replace(MODEL, kv_tokens=kv, contention=0.3, replicas_per_host=per_host)
    t = trace(*requests)
    seen = []
    for kind in (ReferenceCluster, Cluster):
        cluster = kind(model, t, router, seed)
        cluster.start(0.0, 0.25)
        now_s, story = 0.0, []
        for action, wait_s in [*actions, ("start", 1.0), ("start", 300.0)]:
            now_s += wait_s
            cluster.advance(now_s)
            story.append(repr((cluster.samples(now_s), cluster.counts())).replace(".0", ""))
            if action == "start":
                cluster.start(now_s, now_s + 0.5)
            else:
                cluster.stop(now_s)
        seen.append((story, cluster.lifetimes(), cluster.ttft_s.tobytes(), cluster.finish_s.tobytes()))
        assert cluster.counts().open == 0
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", [ReferenceCluster, Cluster])
def test_a_step_full_of_decodes_takes_no_prompt(kind: type[Cluster]) -> None:
    """More seats than tokens in a step: what does not fit waits, and everything ends."""
    model = ServiceModel(base_s=0.1, prefill_token_s=0.01, max_num_batched_tokens=4, max_num_seqs=8)
    cluster = kind(model, trace(*[(0.0, 2, 5)] * 6), "least_loaded", 0)
    cluster.start(0.0, 0.0)
    cluster.advance(100.0)
    assert np.isfinite(cluster.finish_s).all()


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    library.cache_clear()
    try:
        with pytest.raises(ImportError, match="the simulator cannot be compiled: /no/such/compiler"):
            library()
    finally:
        library.cache_clear()


def test_short_prompts_pass_a_long_one_that_still_gets_on() -> None:
    """Steps of 100 tokens take 0.2 s. The short one shares its first step with the long one's quarter of the room."""
    model = ServiceModel(base_s=0.1, prefill_token_s=0.001, max_num_batched_tokens=100, max_num_seqs=8)
    cluster = served(model, trace((0.0, 400, 1), (0.05, 75, 1)))
    assert cluster.ttft_s == pytest.approx([0.975, 0.35])


def beside(model: ServiceModel, other_ready_s: float, *requests: tuple[float, int, int]) -> Cluster:
    """Two replicas, one of which is there from the start."""
    cluster = Cluster(model, trace(*requests), "least_loaded", 0)
    cluster.start(0.0, 0.0)
    cluster.advance(0.0)
    cluster.start(0.0, other_ready_s)
    cluster.advance(100.0)
    return cluster


def test_replicas_of_one_host_slow_each_other_while_they_work_or_start() -> None:
    shared = dataclasses.replace(MODEL, contention=0.5, replicas_per_host=2)
    step = MODEL.step_s(10, 50, 0, 0)
    starting = beside(shared, 50.0, (1.0, 10, 1))
    assert starting.ttft_s[0] == pytest.approx(1.5 * step + 0.005)
    idle = beside(shared, 0.5, (1.0, 10, 1))
    assert idle.ttft_s[0] == pytest.approx(step + 0.005)
    working = beside(shared, 0.5, (1.0, 10, 2), (1.0, 10, 1))
    assert working.ttft_s == pytest.approx([step + 0.005, 1.5 * step + 0.005])  # the first began alone
    decode = MODEL.step_s(0, 0, 1, 10)
    assert working.finish_s[0] == pytest.approx(1.0 + step + 1.5 * decode)


def test_replicas_of_other_hosts_do_not() -> None:
    alone = dataclasses.replace(MODEL, contention=0.5)
    step = MODEL.step_s(10, 50, 0, 0)
    assert beside(alone, 50.0, (1.0, 10, 1)).ttft_s[0] == pytest.approx(step + 0.005)
    assert beside(alone, 0.5, (1.0, 10, 1), (1.0, 10, 1)).ttft_s == pytest.approx([step + 0.005] * 2)

"""One trace against one controller."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from autoscaling.base import Decision, pool_signals
from autoscaling.controller import Controller
from autoscaling.service_model import ServiceModel
from autoscaling.simulator.cluster import Cluster
from autoscaling.traces.trace import Trace

DRAIN_S = 3600.0  # after the last arrival, for those still waiting


@dataclass(frozen=True, slots=True)
class Setup:
    """All but the traffic and the policy. Decisions are made every `interval_s`, on samples `signal_age_s` old: with
    replicas that push every half second those are about the controller's. `startups_s`: how long the first
    replicas that are started take, in turn, where that is known; later ones take the model's time. `seed`: of what a
    replay of the same traffic would not have the same again: between which requests decisions fall, and who of the
    equally loaded gets one."""

    model: ServiceModel
    router: str = "least_loaded"
    initial_replicas: int = 1
    interval_s: float = 1.0
    signal_age_s: float = 0.5
    seed: int = 0
    startups_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """The pool at each decision. `present`: serving, starting and draining replicas, those that cost."""

    at_s: NDArray[np.float64]
    target: NDArray[np.float64]
    serving: NDArray[np.float64]
    present: NDArray[np.float64]
    waiting: NDArray[np.float64]
    backlog_s: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """`ttft_s` is NaN for requests that got none. `events`: the decisions that changed the target, with their time.
    Replica seconds are from the decision to start until gone, within the trace's duration."""

    trace: Trace
    ttft_s: NDArray[np.float64]
    rejected: int
    replica_s: float
    events: tuple[tuple[float, Decision], ...]
    faults: int
    timeline: Timeline


def simulate(
    trace: Trace, controller: Controller, setup: Setup, on_progress: Callable[[float], None] | None = None
) -> Outcome:
    """`on_progress` gets the share done, now and then."""
    cluster = Cluster(setup.model, trace, setup.router, setup.seed)
    target = setup.initial_replicas
    for _ in range(target):
        cluster.start(-setup.model.startup_s, 0.0)
    cluster.advance(0.0)
    phase_s = setup.interval_s * float(np.random.default_rng([setup.seed, 2]).random())
    startups_s = chain(setup.startups_s, repeat(setup.model.startup_s))
    rows: list[tuple[float, ...]] = []
    events: list[tuple[float, Decision]] = []
    faults = tick = 0
    while True:
        now_s = phase_s + tick * setup.interval_s
        tick += 1
        sampled_s = max(0.0, now_s - setup.signal_age_s)
        cluster.advance(sampled_s)
        samples = cluster.samples(sampled_s)
        cluster.advance(now_s)
        counts = cluster.counts()
        if now_s > trace.duration_s and (not counts.open or now_s > trace.duration_s + DRAIN_S):
            break
        signals = pool_signals(
            samples,
            now_s,
            serving=counts.serving,
            starting=counts.starting,
            target=target,
            queued=counts.queued,
        )
        decision = controller.decide(signals, now_s)
        faults += decision.fault is not None
        if decision.target != target:
            events.append((now_s, decision))
            for _ in range(target, decision.target):
                cluster.start(now_s, now_s + next(startups_s))
            for _ in range(decision.target, target):
                cluster.stop(now_s)
            target = decision.target
        present = counts.serving + counts.starting + counts.draining
        rows.append((now_s, target, counts.serving, present, signals.waiting or 0.0, signals.backlog_s or 0.0))
        if on_progress and not tick % 512:
            on_progress(min(1.0, now_s / trace.duration_s))
    columns = np.array(rows or [(0.0,) * 6]).T
    replica_s = sum(
        max(0.0, min(gone, trace.duration_s) - max(0.0, start))
        for start, gone in cluster.lifetimes()
        if start < trace.duration_s
    )
    return Outcome(
        trace, cluster.ttft_s, cluster.counts().rejected, replica_s, tuple(events), faults, Timeline(*columns)
    )


def fair_start(trace: Trace, model: ServiceModel) -> int:
    """Replicas for the traffic of the first minutes: a pool that has been up before the trace begins."""
    first = trace.at_s < min(300.0, trace.duration_s)
    prompt, output = trace.prompt_tokens[first], trace.output_tokens[first]
    decode_s = output * (model.decode_seq_s + model.decode_context_s * (prompt + output / 2))
    work_s = float((model.prefill_token_s * prompt + model.prefill_pair_s * prompt**2 / 2 + decode_s).sum())
    return math.ceil(work_s / min(300.0, trace.duration_s) / 0.7)

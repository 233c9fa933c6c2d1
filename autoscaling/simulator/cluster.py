"""What the simulator needs of a pool of replicas, and which implementation of it to use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autoscaling.base import ReplicaSample
from autoscaling.service_model import ServiceModel
from autoscaling.traces.trace import Trace

ROUTERS = ("least_loaded", "power_of_two", "round_robin")


@dataclass(frozen=True, slots=True)
class Counts:
    """At this moment. `queued`: requests that wait for a first replica; `open`: arrived and neither ended nor
    refused; `rejected`: so far; `arrived`: so far."""

    serving: int
    starting: int
    draining: int
    queued: int
    open: int
    rejected: int
    arrived: int


class Cluster(Protocol):
    """Replicas and the traffic on them. Times never go back. `ttft_s` and `finish_s` are NaN for requests that have
    not got so far; TTFT counts from the arrival to the end of the step that gave the first token."""

    ttft_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]

    def advance(self, until_s: float) -> None:
        """Arrivals and steps up to and including `until_s`."""

    def start(self, now_s: float, ready_s: float) -> None:
        """One more replica, which serves from `ready_s` on."""

    def stop(self, now_s: float) -> bool:
        """One fewer: the last started that does not serve yet, else the last started, which takes no more requests and
        goes when those it has are done. False when there is none."""

    def samples(self, now_s: float) -> list[ReplicaSample]:
        """What each serving replica would report."""

    def counts(self) -> Counts: ...

    def lifetimes(self) -> list[tuple[float, float]]:
        """When each replica was started and was gone; infinite while it is there."""


def make_cluster(model: ServiceModel, trace: Trace, router: str, seed: int) -> Cluster:
    """The compiled one where it can be had."""
    from autoscaling.simulator.native import NativeCluster, library
    from autoscaling.simulator.reference import ReferenceCluster

    lib = library()
    if lib is None:
        return ReferenceCluster(model, trace, router, seed)
    return NativeCluster(lib, model, trace, router, seed)

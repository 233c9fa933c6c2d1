"""Replicas and the traffic on them: replicas.cpp, compiled once per machine."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from autoscaling.base import ReplicaSample
from autoscaling.service_model import ServiceModel
from autoscaling.traces.trace import Trace
from engine.cpp_build import BuildError, load

ROUTERS = ("least_loaded", "power_of_two", "round_robin")

SOURCE = Path(__file__).parent / "replicas.cpp"
# No contraction: the same model in Python, which tests compare with, must round the same way.
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-ffp-contract=off")
_NUM_FIELDS = len(ReplicaSample._fields)
_VOID, _INT, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "sim_new": (_VOID, (_VOID, _VOID, _VOID, _VOID, _VOID, _LONG, _INT, ctypes.c_uint64, _VOID, _VOID)),
    "sim_free": (None, (_VOID,)),
    "sim_advance": (None, (_VOID, _DOUBLE)),
    "sim_start": (None, (_VOID, _DOUBLE, _DOUBLE)),
    "sim_stop": (_INT, (_VOID, _DOUBLE)),
    "sim_samples": (_INT, (_VOID, _DOUBLE, _VOID, _INT)),
    "sim_counts": (None, (_VOID, _VOID)),
    "sim_lifetimes": (_INT, (_VOID, _VOID, _INT)),
}


@cache
def library() -> ctypes.CDLL:
    """Built if need be (seconds). Raises ImportError where it cannot be."""
    try:
        lib = load("simulator", [SOURCE], FLAGS)
    except (BuildError, OSError) as error:
        raise ImportError(f"the simulator cannot be compiled: {error}") from None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


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


class Cluster:
    """Replicas and the traffic on them. Times, in seconds from the trace's start, never go back. `ttft_s` and
    `finish_s`, one per request, are NaN for those that have not got so far; TTFT counts from the arrival to the end of
    the step that gave the first token."""

    def __init__(self, model: ServiceModel, trace: Trace, router: str, seed: int) -> None:
        """`router`: one of ROUTERS. Raises ImportError where the model cannot be compiled."""
        self._lib = library()
        self._at = np.ascontiguousarray(trace.at_s, np.float64)
        self._prompt = np.ascontiguousarray(trace.prompt_tokens, np.int64)
        self._output = np.ascontiguousarray(trace.output_tokens, np.int64)
        self.ttft_s = np.full(len(trace), np.nan)
        self.finish_s = np.full(len(trace), np.nan)
        m = model
        times = np.array(
            [
                m.base_s, m.prefill_token_s, m.prefill_pair_s, m.decode_seq_s, m.decode_context_s, m.overhead_s,
                m.contention,
            ]
        )  # fmt: skip
        limits = np.array(
            [m.max_num_batched_tokens, m.max_num_seqs, m.kv_tokens, m.max_num_waiting, m.replicas_per_host], np.int64
        )
        self._rows = np.empty((16, _NUM_FIELDS))  # grows with the replicas
        self._counts = np.empty(7, np.int64)
        self._started = 0
        self._self = ctypes.c_void_p(
            self._lib.sim_new(
                times.ctypes.data, limits.ctypes.data, self._at.ctypes.data, self._prompt.ctypes.data,
                self._output.ctypes.data, len(trace), ROUTERS.index(router), seed, self.ttft_s.ctypes.data,
                self.finish_s.ctypes.data,
            )
        )  # fmt: skip

    def __del__(self) -> None:
        if hasattr(self, "_self"):
            self._lib.sim_free(self._self)

    def advance(self, until_s: float) -> None:
        """Arrivals and steps up to and including `until_s`."""
        self._lib.sim_advance(self._self, until_s)

    def start(self, now_s: float, ready_s: float) -> None:
        """One more replica, which serves from `ready_s` on."""
        self._started += 1
        self._lib.sim_start(self._self, now_s, ready_s)

    def stop(self, now_s: float) -> bool:
        """One fewer: the last started that does not serve yet, else the last started, which takes no more requests and
        goes when those it has are done. False when there is none."""
        return bool(self._lib.sim_stop(self._self, now_s))

    def samples(self, now_s: float) -> list[ReplicaSample]:
        """What each serving replica would report."""
        serving = self.counts().serving
        if serving > len(self._rows):
            self._rows = np.empty((2 * serving, _NUM_FIELDS))
        n = self._lib.sim_samples(self._self, now_s, self._rows.ctypes.data, len(self._rows))
        return [ReplicaSample._make(row) for row in self._rows[:n].tolist()]

    def counts(self) -> Counts:
        """Replicas and requests as they are now."""
        self._lib.sim_counts(self._self, self._counts.ctypes.data)
        return Counts(*self._counts.tolist())

    def lifetimes(self) -> list[tuple[float, float]]:
        """When each replica was started and was gone; infinite while it is there."""
        out = np.empty((max(1, self._started), 2))
        n = self._lib.sim_lifetimes(self._self, out.ctypes.data, len(out))
        return [(start, gone) for start, gone in out[:n].tolist()]

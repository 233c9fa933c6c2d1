"""engine.cpp, compiled once per machine."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from autoscaling.base import ReplicaSample
from autoscaling.service_model import ServiceModel
from autoscaling.simulator.cluster import ROUTERS, Counts
from autoscaling.traces.trace import Trace

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "engine.cpp"
# No contraction: it would round otherwise than reference.py.
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off")
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
def library() -> ctypes.CDLL | None:
    """Built if need be (seconds); None, after one warning, where it cannot be."""
    try:
        lib = ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "the compiled simulator is unavailable, the Python one runs instead (ten times slower): %s", error
        )
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def _built() -> Path:
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("clang++") or "c++"]
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
    what = hashlib.sha256(b"\0".join((SOURCE.read_bytes(), repr(FLAGS).encode(), version, platform.machine().encode())))
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "sluicegate" / "simulator"
    path = base / f"{what.hexdigest()[:24]}.so"
    if not path.exists():
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=base) as scratch:
            made = Path(scratch) / "engine.so"
            command = [*compiler, *FLAGS, str(SOURCE), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                raise OSError(f"{shlex.join(command)}: {done.stderr.strip()[-500:]}")
            made.replace(path)  # another process sees all of it or nothing
    return path


class NativeCluster:
    """See Cluster."""

    def __init__(self, lib: ctypes.CDLL, model: ServiceModel, trace: Trace, router: str, seed: int) -> None:
        self._lib = lib
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
        self._rows = np.empty((16, _NUM_FIELDS))
        self._counts = np.empty(7, np.int64)
        self._started = 0
        self._self = ctypes.c_void_p(
            lib.sim_new(
                times.ctypes.data, limits.ctypes.data, self._at.ctypes.data, self._prompt.ctypes.data,
                self._output.ctypes.data, len(trace), ROUTERS.index(router), seed, self.ttft_s.ctypes.data,
                self.finish_s.ctypes.data,
            )
        )  # fmt: skip

    def __del__(self) -> None:
        if hasattr(self, "_self"):
            self._lib.sim_free(self._self)

    def advance(self, until_s: float) -> None:
        self._lib.sim_advance(self._self, until_s)

    def start(self, now_s: float, ready_s: float) -> None:
        self._started += 1
        self._lib.sim_start(self._self, now_s, ready_s)

    def stop(self, now_s: float) -> bool:
        return bool(self._lib.sim_stop(self._self, now_s))

    def samples(self, now_s: float) -> list[ReplicaSample]:
        serving = self.counts().serving
        if serving > len(self._rows):
            self._rows = np.empty((2 * serving, _NUM_FIELDS))
        n = self._lib.sim_samples(self._self, now_s, self._rows.ctypes.data, len(self._rows))
        return [ReplicaSample._make(row) for row in self._rows[:n].tolist()]

    def counts(self) -> Counts:
        self._lib.sim_counts(self._self, self._counts.ctypes.data)
        return Counts(*self._counts.tolist())

    def lifetimes(self) -> list[tuple[float, float]]:
        out = np.empty((max(1, self._started), 2))
        n = self._lib.sim_lifetimes(self._self, out.ctypes.data, len(out))
        return [(start, gone) for start, gone in out[:n].tolist()]

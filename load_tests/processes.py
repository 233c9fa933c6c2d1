"""A tree of processes: its CPU time, from /proc, and its end with the one that started it. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress

from deployments.cli.processes import command, stat_fields

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # not first in a child between fork and exec, where it may not take locks


def end_with_parent() -> None:
    """A `preexec_fn`: the child gets SIGTERM when the thread that starts it ends, however that ends."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def cpu_s(pid: int) -> float:
    """User and system time of all its threads; 0 when it has ended."""
    with suppress(OSError, ValueError, IndexError):
        user, system = stat_fields(pid)[11:13]
        return (int(user) + int(system)) / _TICKS_PER_S
    return 0.0


class CpuMeter:
    """CPU time spent by groups of processes since it was made. `roles`: group -> part of its processes' titles; the
    first that fits; what fits none is "other"."""

    def __init__(self, pids: Iterable[int], roles: Mapping[str, str]) -> None:
        self._began = {pid: (_role(command(pid), roles), cpu_s(pid)) for pid in pids}

    def read(self) -> dict[str, float]:
        """Seconds by group."""
        spent: dict[str, float] = {}
        for pid, (role, began) in self._began.items():
            spent[role] = spent.get(role, 0.0) + max(0.0, cpu_s(pid) - began)
        return spent


def _role(name: str, roles: Mapping[str, str]) -> str:
    return next((role for role, part in roles.items() if part in name), "other")

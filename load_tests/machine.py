"""This machine, for reports: its processor, and how much of it is in use."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

_MOMENT_S = 1.0


def cpu_model() -> str:
    """The processor's name; the architecture's where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def busy_cores() -> float:
    """How many cores are in use, over a moment in which this process sleeps."""
    before = _cpu_ticks()
    time.sleep(_MOMENT_S)
    busy, total = (b - a for a, b in zip(before, _cpu_ticks(), strict=True))
    return round((os.cpu_count() or 1) * busy / max(1, total), 2)


def _cpu_ticks() -> tuple[int, int]:
    """Of all cores since boot: busy and all. (0, 0) where the system doesn't say."""
    try:
        fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0, 0
    idle = fields[3] + fields[4]  # waiting for a disk is idle too
    return sum(fields) - idle, sum(fields)

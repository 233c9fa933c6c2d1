"""What this process may use of its machine: cores and memory, within the limits of its control group.

A container sees all cores and all memory of its host, whatever its limits are. Threads beyond the CPU quota are stopped
for most of each period, and memory beyond the limit ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """Cores that this process may keep busy, at least 1: those of its affinity, within its CPU quota. `root` is where
    /proc and /sys are looked for."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [*_quotas_v2(root), *_quotas_v1(root)]
    return max(1, min([affinity, *map(int, quotas)]))


def free_memory(root: Path = _ROOT) -> int | None:
    """Bytes that this process may still take: what the machine has free, within its memory limit. None: not known."""
    found = [limit - used for limit, used in _memory_limits(root) if used is not None]
    if (available := _meminfo(root).get("MemAvailable")) is not None:
        found.append(available)
    return max(0, min(found)) if found else None


def memory_limit(root: Path = _ROOT) -> int | None:
    """Bytes that this process could take if nobody else took any. None: not known."""
    found = [limit for limit, _ in _memory_limits(root)]
    if (total := _meminfo(root).get("MemTotal")) is not None:
        found.append(total)
    return min(found, default=None)


def _memory_limits(root: Path) -> Iterator[tuple[int, int | None]]:
    """Each limit in bytes, and what counts against it now. Files in memory that are dropped when there is need do not
    count."""
    for controller, limit_file, used_file, cached in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for group in _groups(root, controller):
            limit, used = _number(group / limit_file), _number(group / used_file)
            if limit is not None:
                yield limit, None if used is None else used - _cache(group / "memory.stat", cached)


def _quotas_v2(root: Path) -> Iterator[float]:
    for group in _groups(root, ""):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)


def _quotas_v1(root: Path) -> Iterator[float]:
    for group in _groups(root, "cpu"):
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota is not None and period:
            yield quota / period


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those above it. `controller` "" is version 2's only tree.
    Inside a container the tree usually begins at the container's own group."""
    mount = root / "sys/fs/cgroup" / controller
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = mount / path.strip("/")
            while group != mount:
                yield group
                group = group.parent
    yield mount


def _number(file: Path) -> int | None:
    """None for a file that is not there or holds no limit (`max`, or -1)."""
    text = _text(file)
    return int(text) if text.isdigit() else None


def _cache(stat: Path, name: str) -> int:
    """Bytes of files in memory that are dropped when there is need."""
    rows = (line.split() for line in _text(stat).splitlines())
    return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == name), 0)


def _meminfo(root: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""

"""Limits of control groups, as Linux shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.machine import free_memory, memory_limit, usable_cores

GIB = 1 << 30
MEMINFO = f"MemTotal:  {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {10 * GIB // 1024} kB\nHugePages_Total: 0\n"
V2 = {"proc/self/cgroup": "0::/pod/container\n"}
V1 = {"proc/self/cgroup": "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n0::/\n"}


def machine(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        (V2 | {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 64),
        (V2 | {"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        (V2 | {"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        (V2 | {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        (V2 | {"sys/fs/cgroup/pod/cpu.max": "400000 100000", "sys/fs/cgroup/pod/container/cpu.max": "max 100000"}, 4),
        (V1 | {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 3),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "800000",
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000",
            },
            8,
        ),
        (V1 | {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 64),
    ],
)
def test_cores(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    assert usable_cores(machine(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("files", "free", "limit"),
    [
        ({}, 10 * GIB, 16 * GIB),
        (V2 | {"sys/fs/cgroup/memory.max": "max"}, 10 * GIB, 16 * GIB),
        (V2 | {"sys/fs/cgroup/memory.max": f"{4 * GIB}", "sys/fs/cgroup/memory.current": f"{GIB}"}, 3 * GIB, 4 * GIB),
        (
            V2
            | {
                "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}",
                "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}",
                "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            2 * GIB,
            4 * GIB,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}",
            },
            0,
            2 * GIB,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}",
            },
            10 * GIB,
            16 * GIB,
        ),
    ],
)
def test_memory(tmp_path: Path, files: dict[str, str], free: int, limit: int) -> None:
    root = machine(tmp_path, files)
    assert (free_memory(root), memory_limit(root)) == (free, limit)


def test_where_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (free_memory(tmp_path), memory_limit(tmp_path)) == (None, None)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores(tmp_path) == 6

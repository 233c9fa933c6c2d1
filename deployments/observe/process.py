"""What a process of ours holds: where something grows for ever, one of these numbers shows it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping

from deployments.observe.metrics import Definition, Metrics

PROCESS_METRICS: Mapping[str, Definition] = {
    "sluicegate_process_resident_bytes": Definition("gauge", "memory of the process", ()),
    "sluicegate_process_open_files": Definition("gauge", "open file descriptors, connections among them", ()),
    "sluicegate_process_tasks": Definition("gauge", "asyncio tasks of the process's event loop", ()),
    "sluicegate_process_python_blocks": Definition("gauge", "memory blocks of Python objects; dictionaries too", ()),
}

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def publish(metrics: Metrics) -> None:
    """Sets PROCESS_METRICS, of which `metrics` has been made with; on the event loop. It takes less than a
    millisecond. Where there is no /proc, memory and files are left out."""
    metrics.set("sluicegate_process_tasks", len(asyncio.all_tasks()))
    metrics.set("sluicegate_process_python_blocks", sys.getallocatedblocks())
    try:
        with open("/proc/self/statm", "rb") as file:
            metrics.set("sluicegate_process_resident_bytes", int(file.read().split()[1]) * _PAGE_BYTES)
        metrics.set("sluicegate_process_open_files", len(os.listdir("/proc/self/fd")))
    except FileNotFoundError:
        pass

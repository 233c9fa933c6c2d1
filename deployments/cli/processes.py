"""The process tree below this process, from /proc. Linux only; elsewhere there is nothing to see."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes descendants whose parent dies children of this process, so that descendants() never loses one."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """Living processes below this one, zombies not counted."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (command, which may contain anything) state ppid ...
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has just ended
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def command(pid: int) -> str:
    """The command line (or the title the process gave itself); empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def send(pids: list[int], signum: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def end_all(grace_s: float) -> None:
    """Ends every descendant: SIGTERM, and SIGKILL for those alive after `grace_s`."""
    send(descendants(), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (left := descendants()) and time.monotonic() < deadline:
        time.sleep(0.05)
    while left:
        send(left, signal.SIGKILL)
        time.sleep(0.02)
        left = descendants()
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return

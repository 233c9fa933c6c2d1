"""The process tree below this process, from /proc. Linux only; elsewhere there is nothing to see."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes descendants whose parent dies children of this process, so that descendants() never loses one."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int | None = None) -> list[int]:
    """Living processes below the process `root`, by default this one. Zombies are not counted."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        with suppress(OSError, ValueError):  # it has just ended
            state, parent, *_ = stat_fields(pid)
            if state not in "ZX":
                children.setdefault(int(parent), []).append(pid)
    found: list[int] = []
    todo = [os.getpid() if root is None else root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def stat_fields(pid: int) -> list[str]:
    """/proc/PID/stat from the state on; what stands before it, the command's name, may contain anything. Raises OSError
    when the process has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def command(pid: int) -> str:
    """The command line (or the title the process gave itself); empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def find(part: str) -> int | None:
    """A process below this one with `part` in its command line; None when there is none. Takes about 10 ms."""
    return next((pid for pid in descendants() if part in command(pid)), None)


def send(pids: list[int], signum: int) -> None:
    """Sends a signal to those of the processes that have not ended."""
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

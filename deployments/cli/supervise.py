"""A small parent process that stays when everything else goes wrong.

Ray ends at once when its daemons get a signal meant for the whole terminal or process group, and leaves processes
behind when its driver dies. So the work runs in a session of its own, and the parent passes signals on, one at a
time, and afterwards ends whatever is left.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

from deployments.cli import processes

STOP = signal.SIGUSR1  # not SIGTERM, for which Ray puts handlers of its own in place while it starts
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_END_GRACE_S = 3.0
_FORCED = 130


def supervised(work: Callable[[], int]) -> int:
    """The exit status of work(), run in a child process.

    The first signal reaches the child as STOP, also when this process is killed; a second one kills everything.
    On return no descendant is left. Must be called before any thread is started.
    """
    processes.adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _become_child(parent)
        sys.exit(work())
    signalled = False

    def forward(signum: int, frame: object) -> None:
        nonlocal signalled
        if signalled:
            processes.end_all(0.0)
        else:
            processes.send([child], STOP)
        signalled = True

    for signum in _SIGNALS:
        signal.signal(signum, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        return _wait_for(child)
    finally:
        processes.end_all(_END_GRACE_S)


def _become_child(parent: int) -> None:
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, STOP, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(_FORCED)
    processes.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _wait_for(child: int) -> int:
    while True:
        try:
            pid, status = os.waitpid(-1, 0)  # orphans of Ray's are reaped on the way
        except ChildProcessError:
            return _FORCED  # reaped while everything was being killed
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else _FORCED

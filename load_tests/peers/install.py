"""Long commands, run politely: at low priority, their output in a log, with a line now and then."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from load_tests.peers.base import PeerError, Say
from load_tests.servers import tail

_SAY_EVERY_S = 15.0
_TAIL = 3


def step(what: str, argv: Sequence[str | Path], log: Path, say: Say, env: Mapping[str, str] | None = None) -> None:
    """Appends to `log`, whose last line is shown every few seconds. Raises PeerError, naming the log, when the command
    fails; ends it and all its children when interrupted."""
    say(what)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        child = subprocess.Popen(
            ["nice", "-n", "19", *argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | dict(env or {}),
        )
    began = time.monotonic()
    try:
        while True:
            try:
                status = child.wait(_SAY_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                last = " ".join(tail(log, 1))
                say(f"{what}, {time.monotonic() - began:.0f} s: {last[:100]}")
    except BaseException:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait()
        raise
    if status:
        raise PeerError(f"{what} failed with status {status}: {' | '.join(tail(log, _TAIL))} (see {log})")


def venv(folder: Path, log: Path, say: Say) -> Path:
    """The interpreter of the virtual environment in `folder`, which is made if absent."""
    python = folder / "bin" / "python"
    if not python.exists():
        step(f"making {folder}", [sys.executable, "-m", "venv", folder], log, say)
    return python


def need(program: str) -> None:
    if shutil.which(program) is None:
        raise PeerError(f"needs {program}, which is not installed")

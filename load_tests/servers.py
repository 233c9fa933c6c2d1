"""Servers that are measured: started in a process group of their own, awaited, and stopped whatever happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load_tests.errors import LoadError
from load_tests.processes import end_with_parent

SLUICE = (sys.executable, "-c", "import sys; from deployments.cli.main import main; sys.exit(main())")
"""The command `sluice` of the environment that runs this."""

_STOP_S = 45.0  # within which `sluice serve` ends its own processes in order
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Launch:
    """A server's command line. `env` is added to our own environment. `model`: the id under which clients ask for the
    model. `start_s`: how long it may take until it answers."""

    argv: tuple[str, ...]
    model: str
    env: Mapping[str, str] = field(default_factory=dict)
    start_s: float = 300.0


def sluice_serve(
    model: str | Path, port: int, settings: Iterable[str] = (), env: Mapping[str, str] | None = None
) -> Launch:
    """Our own server of one model under the name `demo`. `settings`: KEY=VALUE, as for --set."""
    sets = [part for setting in settings for part in ("--set", setting)]
    argv = (*SLUICE, "serve", str(model), "--name", "demo", "--port", str(port), *sets)
    return Launch(argv, "demo", env or {})


def config_file(args: Mapping[str, Any], port: int) -> dict[str, Any]:
    """For `sluice serve --config`: an application with these `args`, behind one proxy on 127.0.0.1."""
    application = {
        "name": "sluicegate",
        "route_prefix": "/",
        "import_path": "deployments.app:build",
        "args": dict(args),
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port, "keep_alive_timeout_s": 75},
        "logging_config": {"encoding": "JSON", "log_level": "INFO", "enable_access_log": False},
        "applications": [application],
    }


def start(launch: Launch, log: Path) -> subprocess.Popen[bytes]:
    """In a process group of its own, for stop(); told to end when this process does. Its output goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        return subprocess.Popen(
            launch.argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
            env=os.environ | dict(launch.env),
        )


@contextmanager
def running(launch: Launch, log: Path, not_yet: Callable[[], str | None]) -> Iterator[int]:
    """The process id of a server for which `not_yet` has given None; before, it says what is still missing. Raises
    LoadError, and what `not_yet` raises. The server's output goes to `log`."""
    child = start(launch, log)
    try:
        deadline = time.monotonic() + launch.start_s
        while True:
            if child.poll() is not None:
                raise LoadError(f"exited with status {child.returncode}: {_end_of(log)}")
            if (missing := not_yet()) is None:
                break
            if time.monotonic() > deadline:
                raise LoadError(f"not ready after {launch.start_s:.0f} s: {missing}: {_end_of(log)}")
            time.sleep(_POLL_S)
        yield child.pid
    finally:
        stop(child)


@contextmanager
def serving(launch: Launch, log: Path) -> Iterator[int]:
    """The process id of a `sluice serve` that has said that it is ready. As running()."""

    def not_yet() -> str | None:
        return None if re.search(r"^ready ", log.read_text(), re.MULTILINE) else "it has not said that it is ready"

    with running(launch, log, not_yet) as pid:
        yield pid


def stop(child: subprocess.Popen[bytes]) -> None:
    """First the server alone, which knows best how to end its own processes; then all that is left of its group."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def tail(log: Path, lines: int) -> list[str]:
    """The last lines that say something."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        text = file.read().decode(errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()][-lines:]


def _end_of(log: Path) -> str:
    return f"{' | '.join(tail(log, 3))[-500:]} (see {log})"

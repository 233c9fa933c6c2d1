"""A running server: started in a process group of its own, awaited, checked, stopped."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from load_tests.errors import LoadError
from load_tests.peers.base import Launch, PeerError
from load_tests.peers.demo import CHECK_PROMPT, CHECK_TEXT, CHECK_TOKENS
from load_tests.peers.install import tail
from load_tests.processes import end_with_parent

_STOP_S = 45.0
_POLL_S = 0.25
_ANSWER_S = 120.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


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
def running(launch: Launch, port: int, log: Path) -> Iterator[str]:
    """The base URL of a server that has answered the check prompt right. Raises PeerError. The server is stopped at
    the end, whatever happened; its output goes to `log`."""
    child = start(launch, log)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(child, url, launch, log)
        yield url
    finally:
        stop(child)


@contextmanager
def serving(launch: Launch, log: Path) -> Iterator[int]:
    """The process id of a `sluice serve` that has said that it is ready. Raises LoadError. Stopped as by running()."""
    child = start(launch, log)
    try:
        deadline = time.monotonic() + launch.start_s
        while not re.search(r"^ready ", log.read_text(), re.MULTILINE):
            if child.poll() is not None or time.monotonic() > deadline:
                raise LoadError(f"the server did not start: {log.read_text()[-500:]}")
            time.sleep(_POLL_S)
        yield child.pid
    finally:
        stop(child)


def _wait(child: subprocess.Popen[bytes], url: str, launch: Launch, log: Path) -> None:
    deadline = time.monotonic() + launch.start_s
    while True:
        if child.poll() is not None:
            raise PeerError(f"exited with status {child.returncode}: {' | '.join(tail(log, 2))[-200:]} (see {log})")
        if (reason := not_yet(url, launch.model)) is None:
            return
        if time.monotonic() > deadline:
            raise PeerError(f"not ready after {launch.start_s:.0f} s: {reason} (see {log})")
        time.sleep(_POLL_S)


def not_yet(url: str, model: str) -> str | None:
    """None: the server gives the known text. Otherwise why it may only need more time. Raises PeerError when it
    answers wrong: fast and wrong is not fast."""
    body = {"model": model, "prompt": CHECK_PROMPT, "max_tokens": CHECK_TOKENS, "temperature": 0}
    try:
        # A connection for each question: some servers drop those that are used again.
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=_ANSWER_S)
    except httpx.HTTPError as error:
        return f"{error or type(error).__name__}"
    if answer.status_code >= 500 or answer.status_code == 404:  # a proxy may be up before what it serves
        return f"http {answer.status_code}"
    if answer.status_code != 200:
        raise PeerError(f"the first completion: http {answer.status_code} {' '.join(answer.text.split())[:200]}")
    text = answer.json()["choices"][0]["text"]
    if text != CHECK_TEXT:
        raise PeerError(f"wrong text: {text!r} instead of {CHECK_TEXT!r}")
    return None


def stop(child: subprocess.Popen[bytes]) -> None:
    """First the server alone, which knows best how to end its own processes; then all that is left of its group."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()

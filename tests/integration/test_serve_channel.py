"""Replicas that die or are replaced while gateways have streams on them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from helpers_gateway import error_of
from helpers_server import (
    COMPLETIONS,
    COUNT_24,
    NO_WAIT,
    RUNNING,
    WAITING,
    Server,
    count,
    endless,
    events,
    run_beside,
    until,
)

pytestmark = pytest.mark.ray

_PAIR = ("replicas=2", "engine.max_num_seqs=1", "routing_policy=round_robin", NO_WAIT)


@pytest.fixture
def pair(_servers: object) -> Server:
    """Two replicas that run one sequence at a time and take turns."""
    server: Server = _servers.get(*_PAIR)  # type: ignore[attr-defined]
    return server


def test_a_killed_replica_is_not_noticed_before_the_first_token_or_after_it(pair: Server) -> None:
    """Two streams occupy both replicas; two more requests wait, one at each. Then one replica is killed."""
    pair.until_idle()
    with ThreadPoolExecutor(8) as pool, pair.http() as http:
        tokens, begun = pair.tokens_in(6.0, at_least=600), list[int]()
        running = [pool.submit(stream_of, pair, tokens, begun) for _ in range(2)]
        until(lambda: len(begun) == 2 or any(stream.done() for stream in running), "two streams")
        waiting = [pool.submit(http.post, COMPLETIONS, json=count(stream=s)) for s in (False, True)]
        until(lambda: busy(pair) == (2, 2), "two running streams, and two waiting requests")
        os.kill(pair.processes("ModelReplica")[0], signal.SIGKILL)
        streams = [stream.result() for stream in running]
        whole, streamed = (answer.result() for answer in waiting)
    for stream in streams:
        assert stream[-1] == "[DONE]" and json.loads(stream[-2])["choices"][0]["finish_reason"] == "length"
    assert len({"".join(json.loads(event)["choices"][0]["text"] for event in s[:-1]) for s in streams}) == 1
    assert whole.status_code == streamed.status_code == 200
    assert whole.json()["choices"][0]["text"] == COUNT_24
    assert "error" not in streamed.text and streamed.text.endswith("data: [DONE]\n\n")
    pair.until_known()
    pair.until_idle()


def busy(server: Server) -> tuple[float, float]:
    metrics = server.metrics()
    return metrics.total(RUNNING), metrics.total(WAITING)


def stream_of(server: Server, tokens: int, begun: list[int]) -> list[str]:
    """A long stream's events. Adds to `begun` when there are some."""
    got = []
    with server.http() as http, http.stream("POST", COMPLETIONS, json=endless() | {"max_tokens": tokens}) as response:
        for event in events(response):
            got.append(event)
            if len(got) == 3:
                begun.append(tokens)
    return got


def test_whole_answers_lose_their_replica_too(pair: Server) -> None:
    pair.until_idle()
    with ThreadPoolExecutor(8) as pool, pair.http() as http, pair.no_replacements():
        one = pool.submit(http.post, COMPLETIONS, json=endless() | {"stream": False})
        until(lambda: pair.metrics().total(RUNNING) == 1, "a running request")
        for pid in pair.processes("ModelReplica"):
            os.kill(pid, signal.SIGKILL)
        assert error_of(one.result(), 503)["type"] == "server_error"
    pair.until_known()
    pair.until_idle()


def test_garbage_on_a_replicas_port_does_nothing(pair: Server) -> None:
    ports = {port for pid in pair.processes("ModelReplica") for port in listening(pid)}
    assert ports
    with pair.http() as http:
        for port in ports:
            for _ in range(3):
                with contextlib.suppress(httpx.HTTPError):
                    httpx.get(f"http://127.0.0.1:{port}/", timeout=10, trust_env=False)
        assert http.post(COMPLETIONS, json=count()).json()["choices"][0]["text"] == COUNT_24
    assert pair.ready()


def listening(pid: int) -> set[int]:
    """The TCP ports that a process listens on."""
    sockets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(fd)
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in sockets}


def test_a_redeploy_lets_streams_end() -> None:
    done = run_beside("redeploy.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every stream was complete" in done.stdout

"""Replicas taken out of rotation, replaced and restarted on a real Serve: no client notices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from helpers_gateway import error_of
from helpers_server import (
    ADMIN,
    COMPLETIONS,
    COUNT_24,
    MODEL,
    ROOT,
    SLUICE,
    WAIT_S,
    Server,
    count,
    events,
    run_beside,
    until,
)

from load_tests.stand_in import STAND_IN

pytestmark = pytest.mark.ray

TOKENS = 400


@pytest.fixture
def pair(_servers: Any) -> Server:
    """Two gateways and two replicas that take turns; the engine computes nothing."""
    settings = (ADMIN, "replicas=2", "gateway_replicas=2", "routing_policy=round_robin")
    server: Server = _servers.get(*settings, f"engine.executor={STAND_IN}", "engine.executor_options.step_ms=10")
    return server


def drain(server: Server, *args: str) -> subprocess.CompletedProcess[str]:
    command = [*SLUICE, "drain", MODEL, "--base-url", server.url, "--api-key", "sk-demo-sluicegate", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)


def replicas(server: Server) -> dict[str, dict[str, Any]]:
    with server.http() as http:
        [pool] = http.get("/admin/v1/pools").raise_for_status().json()["data"]
    return {replica["id"]: replica for replica in pool["replicas"]}


def told(server: Server, number: int, begun: list[int], max_tokens: int = TOKENS) -> str:
    """The text of a stream that ended well."""
    text, got = "", []
    body = count(prompt=f"{number}", max_tokens=max_tokens, ignore_eos=True, stream=True)
    with server.http() as http, http.stream("POST", COMPLETIONS, json=body) as response:
        assert response.status_code == 200, response.read()
        for event in events(response):
            got.append(event)
            if event != "[DONE]":
                text += json.loads(event)["choices"][0]["text"]
            if len(got) == 2:
                begun.append(number)
    assert got[-1] == "[DONE]" and json.loads(got[-2])["choices"][0]["finish_reason"] == "length"
    return text


def streams(server: Server, pool: ThreadPoolExecutor, number: int) -> list[Future[str]]:
    """Some that run."""
    begun: list[int] = []
    running = [pool.submit(told, server, i, begun) for i in range(number)]
    until(lambda: len(begun) == number or any(future.done() for future in running), "streams")
    return running


def test_streams_end_where_they_are_or_elsewhere_in_time(pair: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        right = list(pool.map(lambda i: told(pair, i, []), range(6)))
        for timeout in ((), ("--timeout", "0.2")):
            pair.until_known()
            one, other = replicas(pair)
            running = streams(pair, pool, 6)
            done = drain(pair, "--replica", one, *timeout)
            assert done.returncode == 0 and done.stdout.endswith(f"{MODEL}/{one}: drained\n"), done
            states = replicas(pair)
            assert (states[one]["status"], states[one]["streams"]) == ("drained", 0)
            assert states[other]["status"] == "active" and pair.ready()
            assert [future.result() for future in running] == right
            before = pair.until_known(1).total("sluicegate_prompt_tokens_total", replica=one)
            assert list(pool.map(lambda i: told(pair, i, []), range(2))) == right[:2]
            assert pair.until_known(1).total("sluicegate_prompt_tokens_total", replica=one) == before
            assert drain(pair, "--undo", "--replica", one).stdout.count("active") == 2
    pair.until_known()


def test_a_whole_pool_out_of_rotation_and_back(pair: Server) -> None:
    with ThreadPoolExecutor(8) as pool, pair.http() as http:
        running = streams(pair, pool, 2)
        done = drain(pair)
        assert done.returncode == 0 and done.stdout.count(": drained\n") == 2, done
        assert all(future.result() for future in running)
        pair.until_known(0)
        for _ in range(4):  # whichever gateway
            assert error_of(http.post(COMPLETIONS, json=count()), 503)["code"] == "model_not_ready"
        assert not pair.ready()
        assert drain(pair, "--undo").returncode == 0
        pair.until_known()
        for _ in range(4):
            assert http.post(COMPLETIONS, json=count(max_tokens=2)).status_code == 200


def test_streams_of_the_only_replica_wait_for_its_successor(server: Server) -> None:
    """Greedy ones, so that a successor with the same weights says the same."""
    with ThreadPoolExecutor(8) as pool:
        right = list(pool.map(lambda i: told(server, i, [], 120), range(4)))
        begun: list[int] = []
        running = [pool.submit(told, server, i, begun, 120) for i in range(4)]
        until(lambda: len(begun) == 4 or any(future.done() for future in running), "streams")
        server.kill_one("ModelReplica")
        assert [future.result() for future in running] == right
    with server.http() as http:
        assert http.post(COMPLETIONS, json=count()).json()["choices"][0]["text"] == COUNT_24
    server.until_idle()


def test_a_rolling_update_with_room_loses_nothing() -> None:
    done = run_beside("rolling.py")
    assert done.returncode == 0 and "no request was lost" in done.stdout, done.stdout + done.stderr


def test_a_killed_replica_that_was_out_of_rotation_comes_back_into_it(pair: Server) -> None:
    one, _ = replicas(pair)
    assert drain(pair, "--replica", one).returncode == 0
    pids = pair.processes("ModelReplica")
    with pair.http() as http:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        until(lambda: {r["status"] for r in replicas(pair).values()} == {"active"} and len(replicas(pair)) == 2, "two")
        pair.until_known()
        for _ in range(4):  # whichever gateway
            assert http.post(COMPLETIONS, json=count(max_tokens=2)).status_code == 200

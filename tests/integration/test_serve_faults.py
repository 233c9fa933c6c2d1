"""Clients that leave, processes that are killed: what the others see, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from helpers_gateway import error_of
from helpers_server import (
    COMPLETIONS,
    COUNT_24,
    MODEL,
    NO_WAIT,
    RUNNING,
    WAITING,
    Server,
    asked,
    count,
    endless,
    events,
    until,
)

pytestmark = pytest.mark.ray


@pytest.fixture
def narrow(_servers: Any) -> Server:
    """It runs two sequences at a time, and its answers do not wait for a successor."""
    server: Server = _servers.get(NO_WAIT, "engine.max_num_seqs=2")
    return server


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def broken_stream(server: Server, begun: threading.Event) -> list[str]:
    """The events of a stream that is cut. `begun` is set once it has some tokens."""
    got = []
    with server.http() as http, http.stream("POST", COMPLETIONS, json=endless()) as response:
        assert response.status_code == 200
        for event in events(response):
            got.append(event)
            if len(got) == 5:
                begun.set()
    return got


def until_count_works(server: Server) -> None:
    until(server.ready, "readiness")
    with server.http() as http:
        assert text_of(http.post(COMPLETIONS, json=count())) == COUNT_24


def test_a_client_that_leaves_frees_its_blocks(server: Server) -> None:
    before = server.until_idle()
    with server.http() as http:
        for stream in (endless(), endless(n=3)):
            with http.stream("POST", COMPLETIONS, json=stream) as response:
                got = events(response)
                next(got)
                until(lambda: server.metrics().total(RUNNING) >= 1, "running request")
                until(lambda: server.metrics().total("sluicegate_kv_usage") > 0, "used block")
            server.until_idle()
        with asked(server, endless() | {"stream": False}):  # not streaming: nothing has been sent yet when it leaves
            until(lambda: server.metrics().total(RUNNING) == 1, "running request")

    def left() -> list[float]:
        after = server.until_idle()
        counted = ("sluicegate_requests_total", "abort"), ("sluicegate_http_requests_total", "499")
        labels = "finished_reason", "status"
        return [
            after.total(name, **{label: value}) - before.total(name, **{label: value})
            for (name, value), label in zip(counted, labels, strict=True)
        ]

    until(lambda: min(left()) >= 3, "three that left")
    assert left() == [3, 3]


def test_a_client_that_leaves_the_queue(narrow: Server) -> None:
    narrow.until_idle()
    with narrow.http() as http:
        running = [http.send(http.build_request("POST", COMPLETIONS, json=endless()), stream=True) for _ in range(2)]
        streams = [events(response) for response in running]
        for stream in streams:
            next(stream)
        with asked(narrow, count()):
            until(lambda: narrow.metrics().total(WAITING) == 1, "queue")
        until(lambda: (m := narrow.all_metrics()) and m.total(WAITING) == 0, "empty queue")
        assert narrow.until_known().total(RUNNING) == 2  # it has not been served
        for stream in streams:
            assert json.loads(next(stream))["choices"]
        for response in running:
            response.close()
    narrow.until_idle()


def test_a_killed_replica_whose_answers_may_not_wait(narrow: Server) -> None:
    server, begun = narrow, threading.Event()
    with ThreadPoolExecutor(8) as pool, server.http() as http, server.no_replacements():
        stream = pool.submit(broken_stream, server, begun)
        until(lambda: begun.is_set() or stream.done(), "stream")
        whole = pool.submit(http.post, COMPLETIONS, json=endless() | {"stream": False})
        until(lambda: server.metrics().total(RUNNING) == 2, "two running requests")
        server.kill_one("ModelReplica")
        *rest, last = stream.result()
        assert json.loads(last)["error"].keys() == {"message", "type", "param", "code"}
        assert "[DONE]" not in rest and all("choices" in json.loads(event) for event in rest)
        # Without a first token it would have been tried elsewhere; with one it would have been resumed elsewhere.
        assert error_of(whole.result(), 503)["code"] in ("model_not_ready", None)
        until(lambda: not server.ready(), "503 from /health/ready")
        for body in (count(), count(stream=True)):
            refused = http.post(COMPLETIONS, json=body)
            assert error_of(refused, 503)["code"] == "model_not_ready"
            assert int(refused.headers["retry-after"]) >= 1
        assert http.get("/v1/models").json()["data"][0]["id"] == MODEL
    until_count_works(server)
    server.until_idle()


def test_a_killed_router_is_not_missed(server: Server) -> None:
    [old] = server.processes("ModelRouter")
    server.kill_one("ModelRouter")
    with server.http() as http:
        for _ in range(3):
            assert text_of(http.post(COMPLETIONS, json=count())) == COUNT_24
        until(lambda: [pid for pid in server.processes("ModelRouter") if pid != old], "new router")
        assert text_of(http.post(COMPLETIONS, json=count())) == COUNT_24


def test_a_killed_gateway(server: Server) -> None:
    with killed_gateway(server) as stream, pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
        stream.result()


def test_a_killed_gateway_behind_serves_proxy(serves_proxy: Server) -> None:
    with killed_gateway(serves_proxy) as stream:
        *rest, last = stream.result()
        assert "error" in json.loads(last) and "[DONE]" not in rest


@contextlib.contextmanager
def killed_gateway(server: Server) -> Iterator[Future[list[str]]]:
    """A stream whose gateway has been killed. One that was to come in one piece is refused."""
    begun = threading.Event()
    with ThreadPoolExecutor(8) as pool, server.http() as http:
        stream = pool.submit(broken_stream, server, begun)
        until(lambda: begun.is_set() or stream.done(), "stream")
        whole = pool.submit(http.post, COMPLETIONS, json=endless() | {"stream": False})
        until(lambda: server.metrics().total(RUNNING) == 2, "two running requests")
        server.kill_one("Gateway")
        yield stream
        assert error_of(whole.result(), 503)["type"] == "server_error"
    until_count_works(server)
    server.until_idle()  # the replica has noticed too

"""Clients that leave, processes that are killed: what the others see, and that nothing stays behind."""

from __future__ import annotations

import http.client as http_client
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from helpers_gateway import error_of
from helpers_server import COMPLETIONS, COUNT_24, KEY, MODEL, NO_WAIT, Server, count, endless, events, until

pytestmark = pytest.mark.ray


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
                until(lambda: server.metrics().total("sluicegate_requests_running") >= 1, "running request")
                until(lambda: server.metrics().total("sluicegate_kv_usage") > 0, "used block")
            server.until_idle()
        with pytest.raises(httpx.ReadTimeout):  # not streaming: nothing has been sent yet when it leaves
            http.post(COMPLETIONS, json=endless() | {"stream": False}, timeout=0.5)
    after = server.until_idle()
    for name, labels in (
        ("sluicegate_requests_total", {"finished_reason": "abort"}),
        ("sluicegate_http_requests_total", {"status": "499"}),
    ):
        assert after.total(name, **labels) - before.total(name, **labels) == 3


def test_a_client_that_leaves_the_queue(tight: Server) -> None:
    tight.until_idle()
    waiting = "sluicegate_requests_waiting"
    ask = count(max_tokens=330, ignore_eos=True, stream=True)  # four of these fill the batch, and fit the pool
    with tight.http() as http:
        running = [http.send(http.build_request("POST", COMPLETIONS, json=ask), stream=True) for _ in range(4)]
        streams = [events(response) for response in running]
        for stream in streams:
            next(stream)
        fifth = http_client.HTTPConnection("127.0.0.1", tight.port)
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        fifth.request("POST", COMPLETIONS, json.dumps(count()), headers)
        until(lambda: tight.metrics().total(waiting) == 1, "queue")
        fifth.close()
        until(lambda: tight.metrics().total(waiting) == 0, "empty queue")
        for stream in streams:
            assert json.loads(next(stream))["choices"]
        for response in running:
            response.close()
    tight.until_idle()


def test_a_killed_replica_whose_answers_may_not_wait(_servers: Any) -> None:
    server: Server = _servers.get(NO_WAIT)
    begun = threading.Event()
    with ThreadPoolExecutor() as pool, server.http() as http:
        stream = pool.submit(broken_stream, server, begun)
        until(lambda: begun.is_set() or stream.done(), "stream")
        whole = pool.submit(http.post, COMPLETIONS, json=endless() | {"stream": False})
        until(lambda: server.metrics().total("sluicegate_requests_running") == 2, "two running requests")
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
    begun = threading.Event()
    with ThreadPoolExecutor() as pool, server.http() as http:
        stream = pool.submit(broken_stream, server, begun)
        until(lambda: begun.is_set() or stream.done(), "stream")
        whole = pool.submit(http.post, COMPLETIONS, json=endless() | {"stream": False})
        until(lambda: server.metrics().total("sluicegate_requests_running") == 2, "two running requests")
        server.kill_one("Gateway")
        *rest, last = stream.result()
        assert "error" in json.loads(last) and "[DONE]" not in rest
        error_of(whole.result(), 503)
    until_count_works(server)
    server.until_idle()  # the replica has noticed too

"""Pools, tiers, routes and an upstream on a real Serve; replicas killed under streams; routes changed while it runs."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from helpers_gateway import error_of
from helpers_server import CHAT, COMPLETIONS, COUNT_24, MODEL, Server, count, events, run_beside, until

pytestmark = pytest.mark.ray

STREAMS = 16
_ROUTES = "applications.0.deployments.0.user_config.routes"


def stream_body(number: int) -> dict[str, Any]:
    drawn = {"temperature": 0.8, "seed": number, "presence_penalty": 0.3}
    prompt = f"Story number {number}. Once upon a time, in a town of {number + 2} houses, there was"
    more = drawn if number % 2 else {}
    return count(
        prompt=prompt, max_tokens=64, ignore_eos=True, stream=True, stream_options={"include_usage": True}, **more
    )


def told(server: Server, number: int, begun: list[int]) -> tuple[str, Any, int]:
    """The text, the usage and how many ends a client has seen."""
    text, usage, ends = "", None, 0
    with server.http() as http, http.stream("POST", COMPLETIONS, json=stream_body(number)) as response:
        assert response.status_code == 200, response.read()
        for event in events(response):
            if event == "[DONE]":
                ends += 1
                continue
            chunk = json.loads(event)
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                text += choice["text"]
                ends += choice["finish_reason"] is not None
            if len(text) > 20:
                begun.append(number)
            usage = chunk.get("usage") or usage
    del usage["prompt_tokens_details"]  # what was cached differs from run to run
    return text, usage, ends


def test_a_replica_killed_under_streams_is_not_noticed(_servers: Any) -> None:
    server: Server = _servers.get("replicas=2")
    begun: list[int] = []
    with ThreadPoolExecutor(STREAMS) as pool:
        right = list(pool.map(lambda i: told(server, i, []), range(STREAMS)))
        assert {ends for _, _, ends in right} == {2}
        running = [pool.submit(told, server, i, begun) for i in range(STREAMS)]
        until(lambda: len(set(begun)) == STREAMS, "streams")
        os.kill(server.processes("ModelReplica")[0], signal.SIGKILL)
        assert [future.result() for future in running] == right
    server.until_known()
    server.until_idle()


class _Upstream(BaseHTTPRequestHandler):
    """Says the same to everybody."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        usage = {"prompt_tokens": 4, "completion_tokens": 2}
        text = {"delta": {"content": "from elsewhere"}, "text": "from elsewhere"}
        for chunk in (
            {"choices": [{"index": 0, **text}]},
            {"choices": [{"index": 0, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ):
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def upstream() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Upstream)
    server.asked = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture(scope="module")
def multi(upstream: ThreadingHTTPServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """cluster_configs/multi-model.yaml, and a route of one pool with the upstream behind it."""
    with Server.running(
        tmp_path_factory.mktemp("multi") / "log",
        f"upstreams.0.base_url=http://127.0.0.1:{upstream.server_port}/v1",
        f"{_ROUTES}.backed={{pools: [smollm2-short], fallbacks: [elsewhere]}}",
        config="cluster_configs/multi-model.yaml",
    ) as server:
        server.replicas = 2
        yield server


def served(server: Server) -> tuple[float, ...]:
    metrics = server.until_idle()
    return tuple(metrics.total("sluicegate_requests_total", model=pool) for pool in ("smollm2-short", "smollm2-long"))


def test_pools_and_tiers(multi: Server) -> None:
    multi.until_known()
    admin, free = multi.http("sk-demo-admin"), multi.http("sk-demo-free")
    with admin, free:
        ids = [model["id"] for model in admin.get("/v1/models").json()["data"]]
        assert ids == [MODEL, "smollm2-135m-long", "backed"]
        short, long = served(multi)
        assert admin.post(COMPLETIONS, json=count()).json()["choices"][0]["text"] == COUNT_24
        assert free.post(COMPLETIONS, json=count()).json()["choices"][0]["text"] == COUNT_24
        assert served(multi) == (short + 2, long)
        much = admin.post(COMPLETIONS, json=count(prompt="word " * 2500, max_tokens=1))
        assert much.status_code == 200 and served(multi) == (short + 2, long + 1)
        too_long = admin.post(COMPLETIONS, json=count(prompt="word " * 9000, max_tokens=1))
        assert error_of(too_long, 400)["code"] == "context_length_exceeded"


def test_an_upstream_serves_while_a_pool_is_down(multi: Server, upstream: Any) -> None:
    multi.until_known()
    chat = {"model": "backed", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    with multi.http("sk-demo-admin") as admin, multi.http("sk-demo-free") as free:
        assert "from elsewhere" not in admin.post(CHAT, json=chat).text and not upstream.asked
        with multi.no_replacements():
            multi.kill_one("ModelReplica-smollm2-short")
            answers = [admin.post(CHAT, json={**chat, "stream": stream}) for stream in (False, True)]
            assert all(a.status_code == 200 and "from elsewhere" in a.text for a in answers)
            assert answers[0].json()["usage"]["completion_tokens"] == 2
            assert error_of(free.post(CHAT, json=chat), 503)["code"] == "model_not_ready"  # this tier may not use it
            path, body = upstream.asked[0]
            assert path == "/v1/chat/completions" and body["messages"] == chat["messages"] and body["max_tokens"] == 3
            assert admin.post(COMPLETIONS, json=count()).json()["choices"][0]["text"] == COUNT_24  # by the other pool
        until(lambda: "from elsewhere" not in admin.post(CHAT, json=chat).text, "own answer again")


def test_routes_change_without_a_restart() -> None:
    done = run_beside("reroute.py")
    assert done.returncode == 0 and "routes have changed" in done.stdout, done.stdout + done.stderr

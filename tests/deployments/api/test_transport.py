"""What a client meets before, between and instead of tokens: waiting, silence, its own slowness, browsers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.parse
from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest
from helpers_gateway import COUNT, COUNT_24, COUNT_24_IDS, MODEL, FakeBackend, client, error_of, events_of, serving
from pydantic import ValidationError

from deployments.api.body import ClientGoneError
from deployments.api.sse import EventStream
from deployments.config.gateway import GatewayConfig
from deployments.observe.request_log import RequestLog
from deployments.routing.errors import ModelUnavailableError

pytestmark = pytest.mark.sockets

COMP = "/v1/completions"
ASK = {"model": MODEL, "prompt": COUNT, "max_tokens": 24, "stream": True}
KEY = "sk-tests-0123456789abcdef"
WAIT_S = 60.0


class Sent:
    """Plays the client's end of one answer; `stuck` makes it take nothing."""

    def __init__(self) -> None:
        self.messages: list[MutableMapping[str, Any]] = []
        self.stuck = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if self.stuck:
            await asyncio.Event().wait()
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages)


# ------------------------------------------------------------------------------------------------ in the queue
def queued(fail: Exception | None = None) -> tuple[FakeBackend, threading.Event]:
    """A backend whose first token, or error, waits for the event."""
    go = threading.Event()

    async def gate(step: int) -> None:
        if step == 0:
            await asyncio.to_thread(go.wait, WAIT_S)

    return FakeBackend(gate=gate, fail=fail), go


def read_all(base: str, go: threading.Event) -> tuple[httpx.Response, bytes]:
    """The answer; its first token may come once two comments have."""
    with httpx.stream("POST", base + COMP, json=ASK, timeout=WAIT_S, trust_env=False) as response:
        raw = b""
        for part in response.iter_raw():
            raw += part
            if raw.count(b": keep-alive\n\n") >= 2:
                go.set()
    return response, raw


def test_a_queued_stream_begins_with_comments() -> None:
    backend, go = queued()
    with serving(backend, GatewayConfig(keepalive_s=0.02)) as base:
        response, raw = read_all(base, go)
    assert response.status_code == 200 and raw.startswith(b": keep-alive\n\n")
    events = events_of(raw)
    assert "".join(c["choices"][0]["text"] for c in events[:-1]) == COUNT_24 and events[-1] == "[DONE]"


def test_after_a_comment_an_error_is_an_event() -> None:
    backend, go = queued(ModelUnavailableError(2.0))
    with serving(backend, GatewayConfig(keepalive_s=0.02)) as base:
        response, raw = read_all(base, go)
    assert response.status_code == 200
    [event] = events_of(raw)
    assert event["error"]["code"] == "model_not_ready"
    assert backend.closed == 1


async def test_before_a_comment_an_error_has_its_status() -> None:
    async with client(FakeBackend(fail=ModelUnavailableError(2.0)), GatewayConfig(keepalive_s=1000)) as http:
        error_of(await http.post(COMP, json=ASK), 503)


async def test_whoever_asks_whether_it_has_begun_stops_the_comments() -> None:
    sent = Sent()
    async with EventStream(sent, 0.0, 60.0) as stream:
        assert not await stream.begun()
        await asyncio.sleep(0.01)
        assert sent.messages == []
    async with EventStream(sent, 1000.0, 60.0) as stream:
        await stream.write(b"data: 1\n\n")
        assert await stream.begun()
        await stream.end(b"data: 2\n\n")
    assert [m["type"].rpartition(".")[2] for m in sent.messages] == ["start", "body", "body"]
    assert sent.body == b"data: 1\n\ndata: 2\n\n" and not sent.messages[-1]["more_body"]


# ------------------------------------------------------------------------------------------------ slow readers
async def test_a_client_that_takes_nothing_is_gone() -> None:
    sent = Sent()
    with pytest.raises(ClientGoneError):
        async with EventStream(sent, 1000.0, 0.01) as stream:
            await stream.write(b"data: 1\n\n")
            sent.stuck = True
            await stream.write(b"data: 2\n\n")
    assert sent.body == b"data: 1\n\n"


def test_a_client_that_takes_nothing_is_gone_on_a_socket() -> None:
    """Its answer is larger than the buffers of both ends."""
    logged = threading.Event()
    finished: list[RequestLog] = []

    def on_finished(record: RequestLog) -> None:
        finished.append(record)
        logged.set()

    backend = FakeBackend(script=lambda request, index: COUNT_24_IDS * 300)
    body = json.dumps({**ASK, "prompt": [COUNT] * 8, "n": 8, "logprobs": 5, "max_tokens": 7200}).encode()
    with serving(backend, GatewayConfig(send_timeout_s=0.2), on_finished) as base:
        url = urllib.parse.urlsplit(base)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(WAIT_S)
            sock.connect((url.hostname, url.port))
            sock.sendall(
                b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (COMP.encode(), len(body), body)
            )
            assert backend.ended.wait(WAIT_S) and logged.wait(WAIT_S)
    assert finished[0].status == 499 and finished[0].completion_tokens < 64 * 7200


# ------------------------------------------------------------------------------------------------ browsers
ORIGIN = "https://app.example"
BROWSERS = GatewayConfig(api_keys=(KEY,), cors_origins=(ORIGIN,))
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-lang",
}


async def test_browsers_are_kept_out_by_default() -> None:
    async with client(FakeBackend(), GatewayConfig(api_keys=(KEY,))) as http:
        error_of(await http.options(COMP, headers=PREFLIGHT), 405)
        answer = await http.post(COMP, json=ASK, headers={"origin": ORIGIN, "authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200 and not [name for name in answer.headers if name.startswith("access-control")]


async def test_browsers_of_one_origin() -> None:
    async with client(FakeBackend(), BROWSERS) as http:
        asked = await http.options(COMP, headers=PREFLIGHT)  # which carries no key
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert {"authorization", "content-type"} <= set(asked.headers["access-control-allow-headers"].split(", "))
        assert "access-control-allow-credentials" not in asked.headers
        for headers, status in (({"authorization": f"Bearer {KEY}"}, 200), ({}, 401)):
            answer = await http.post(COMP, json=ASK, headers={**headers, "origin": ORIGIN})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            assert answer.headers["access-control-expose-headers"] == "*"
        refused = await http.options(COMP, headers={**PREFLIGHT, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://*.example", "", "null"])
def test_origins_are_checked(origin: str) -> None:
    with pytest.raises(ValidationError):
        GatewayConfig(cors_origins=(origin,))

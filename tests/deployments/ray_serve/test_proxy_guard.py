"""The middleware in Serve's proxy, around apps that answer as Serve does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

from deployments.ray_serve.proxy_guard import SEND_TIMEOUT, ProxyGuard
from deployments.ray_serve.request_head import MAX_HEADER_BYTES, MAX_HEADERS, MAX_URL_BYTES

API = "/v1/completions"
PLAIN, JSON, EVENTS = b"text/plain; charset=utf-8", b"application/json", b"text/event-stream; charset=utf-8"


def start(status: int, kind: bytes, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"Content-Type", kind), *headers]}


def body(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


OK = (start(200, JSON), body(b"{}"))


class Answer:
    """What a client got, and what the app behind the guard was given."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.scope: dict[str, Any] | None = None

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        given = [(k.lower(), v) for k, v in self.messages[0]["headers"]]
        assert len(dict(given)) == len(given), "a header is given twice"
        return dict(given)

    @property
    def body(self) -> bytes:
        kinds = [m["type"] for m in self.messages]
        assert kinds == ["http.response.start"] + ["http.response.body"] * (len(kinds) - 1)
        return b"".join(m["body"] for m in self.messages[1:])

    @property
    def error(self) -> dict[str, Any]:
        assert self.headers[b"content-type"] == b"application/json"
        assert self.headers[b"content-length"] == str(len(self.body)).encode()
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error


async def ask(
    answers: Iterable[dict[str, Any]], path: str = API, headers: Iterable[tuple[bytes, bytes]] = ()
) -> Answer:
    got = Answer()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got.scope = dict(scope)
        for message in answers:
            await send(message)

    async def send(message: Any) -> None:
        got.messages.append(message)

    async def receive() -> Any:
        raise AssertionError("nobody asked for the body")

    await ProxyGuard(app)({"type": "http", "path": path, "headers": list(headers)}, receive, send)
    return got


async def test_a_usable_request_id_is_passed_on_and_back() -> None:
    got = await ask((start(200, JSON, (b"X-Request-Id", b"other")), body(b"{}")), headers=[(b"x-request-id", b"a-1")])
    assert got.scope is not None and got.scope["headers"] == [(b"x-request-id", b"a-1")]
    assert (got.status, got.headers[b"x-request-id"], got.body) == (200, b"a-1", b"{}")


@pytest.mark.parametrize("given", [[], [b""], [b"a\tb"], [b"x" * 129], [b"\xff"], [b"a", b"b"]], ids=repr)
async def test_any_other_request_id_is_replaced(given: list[bytes]) -> None:
    got = await ask(OK, headers=[(b"x-request-id", g) for g in given])
    made = got.headers[b"x-request-id"]
    assert made.startswith(b"req_") and made not in given
    assert got.scope is not None and got.scope["headers"] == [(b"x-request-id", made)]


@pytest.mark.parametrize(
    "headers",
    [
        [(b"a", b"b" * MAX_HEADER_BYTES)],
        [(b"a", b"")] * (MAX_HEADERS + 1),
        [(b"x-request-id", b"a")] * (MAX_HEADERS + 1),
    ],
    ids=["bytes", "number", "ids"],
)
async def test_too_many_headers(headers: list[tuple[bytes, bytes]]) -> None:
    got = await ask(OK, headers=headers)
    assert got.scope is None
    assert got.status == 431 and got.error["type"] == "invalid_request_error"
    assert got.headers[b"connection"] == b"close"


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x-request-timeout-seconds", b"0")],
        [(b"x-request-timeout-seconds", b"\xff")],
        [(b"x-request-disconnect-disabled", b"?1")],
        [(b"serve_multiplexed_model_id", b"\xff"), (b"serve-multiplexed-model-id", b"m")],
        [(b"x-serve-router-a", b"b")],
    ],
    ids=repr,
)
async def test_headers_that_only_serve_may_set_are_dropped(headers: list[tuple[bytes, bytes]]) -> None:
    got = await ask(OK, headers=[*headers, (b"x-request-id", b"a")])
    assert got.status == 200
    assert got.scope is not None and got.scope["headers"] == [(b"x-request-id", b"a")]


@pytest.mark.parametrize("sent", [b"caf\xe9", "caf\xe9".encode()])
async def test_a_session_id_reaches_serve_in_utf_8(sent: bytes) -> None:
    got = await ask(OK, headers=[(b"x-session-id", sent)])
    assert got.scope is not None and (b"x-session-id", b"caf\xc3\xa9") in got.scope["headers"]


async def test_a_long_url() -> None:
    got = await ask(OK, path="/" + "a" * MAX_URL_BYTES + API)
    assert got.scope is None
    assert got.status == 414 and got.error["type"] == "invalid_request_error"


async def test_a_body_that_nobody_would_take() -> None:
    got = await ask(OK, headers=[(b"content-length", b"99999999999")])
    assert got.scope is None
    assert got.status == 413 and got.headers[b"connection"] == b"close"


async def test_an_exception_of_serves_is_an_answer_too() -> None:
    messages: list[Any] = []

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        raise AssertionError("nobody asked for the body")

    await ProxyGuard(broken)({"type": "http", "path": API, "headers": []}, receive, send)
    assert messages[0]["status"] == 503
    assert json.loads(messages[1]["body"])["error"]["type"] == "server_error"
    with pytest.raises(UnicodeDecodeError):
        await ProxyGuard(broken)({"type": "http", "path": "/another/app", "headers": []}, receive, send)


PATHS = [API, "/v1/models", "/v1/models/a/b", "/health", "/health/ready", "/tokenize", "/metrics", "/pre/fix" + API]


@pytest.mark.parametrize("path", PATHS)
async def test_no_application_yet_or_any_more_is_unavailable(path: str) -> None:
    got = await ask((start(404, PLAIN), body(b"Path '/x' not found. Ping http://.../-/routes")), path)
    assert got.status == 503 and got.error["type"] == "service_unavailable_error"
    assert int(got.headers[b"retry-after"]) >= 1
    assert got.headers[b"x-request-id"].startswith(b"req_")


@pytest.mark.parametrize("status", [408, 429, 503])
async def test_serves_own_refusals_keep_their_status_and_retry_after(status: int) -> None:
    got = await ask((start(status, PLAIN, (b"retry-after", b"7")), body(b"Request dropped")))
    assert (got.status, got.headers[b"retry-after"]) == (status, b"7")
    assert "dropped" not in got.error["message"]


@pytest.mark.parametrize("path", ["/", "/-/routes", "/other", "/v1", "/healthy", "/my/metrics.html"])
async def test_other_applications_answers_are_left_alone(path: str) -> None:
    got = await ask((start(404, PLAIN), body(b"not found")), path)
    assert (got.status, got.body) == (404, b"not found")


async def test_the_gateways_own_answers_are_left_alone() -> None:
    for status in (404, 503, 500):
        got = await ask((start(status, JSON), body(b'{"error":', more=True), body(b"1}")))
        assert (got.status, got.body) == (status, b'{"error":1}')
    got = await ask((start(200, PLAIN), body(b"# metrics")), "/metrics")
    assert (got.status, got.body) == (200, b"# metrics")


async def test_a_gateway_that_dies_before_it_answers() -> None:
    got = await ask(())
    assert got.status == 503 and got.error["type"] == "server_error"
    assert (await ask((), "/other")).messages == []


async def test_a_gateway_that_dies_in_a_stream() -> None:
    event = b'data: {"choices":[]}\n\n'
    got = await ask((start(200, EVENTS), body(event, more=True)))
    assert got.body.startswith(event) and got.body.endswith(b"\n\n") and b"[DONE]" not in got.body
    assert json.loads(got.body.removeprefix(event).removeprefix(b"data: "))["error"]["type"] == "server_error"
    assert got.messages[-1].get("more_body", False) is False


async def test_a_gateway_that_dies_in_a_json_answer_leaves_it_visibly_unfinished() -> None:
    got = await ask((start(200, JSON), body(b'{"a":', more=True)))
    assert got.messages[-1]["more_body"] is True


# --------------------------------------------------------------------------------- clients that take nothing
async def test_a_client_that_takes_nothing_has_left() -> None:
    """The app learns of it as of any other that leaves, and what it still sends goes nowhere."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        if message.get("body") == b"data: 2\n\n":
            await asyncio.Event().wait()
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        left = asyncio.create_task(receive())
        await send({**start(200, EVENTS), SEND_TIMEOUT: 0.01})
        for i in range(4):
            await send(body(b"data: %d\n\n" % i, more=True))
        assert (await left)["type"] == "http.disconnect"
        assert (await receive())["type"] == "http.disconnect"

    await ProxyGuard(app)({"type": "http", "path": API, "headers": []}, receive, send)
    assert b"".join(m.get("body", b"") for m in sent) == b"data: 0\n\ndata: 1\n\n"
    assert SEND_TIMEOUT not in sent[0]


async def test_waiting_for_a_client_can_be_given_up() -> None:
    """Serve cancels its listening when an answer is complete: that is not the guard's to swallow."""
    cancelled = False

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        pass

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal cancelled
        listening = asyncio.create_task(receive())
        await asyncio.sleep(0)
        listening.cancel()
        await asyncio.wait([listening])
        cancelled = listening.cancelled()
        await send(start(200, JSON))
        await send(body(b"{}"))

    await ProxyGuard(app)({"type": "http", "path": API, "headers": []}, receive, send)
    assert cancelled

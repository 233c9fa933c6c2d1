"""The first thing a request meets, and the last thing its answer passes: a small ASGI middleware inside Serve's proxy.

Serve's proxy copies a client's X-Request-Id into its own context and back into the answer unseen, and its HTTP
parser puts no bound on headers. It answers in plain text when it knows no application for a path (not deployed yet,
or being removed), and not at all when a gateway dies. It waits for ever for a client that stops reading, while the
gateway goes on sending to it. And it has the gateway ask for every body by a call of its own, which takes longer than
all the gateway does. All of that is mended here; only a head that arrives a byte at a time is not seen before
it is complete, and Serve's HTTP server sets it no time limit: a front like cluster_configs/front does.
From here requests also take the short way to a gateway, see relay.
Enabled by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH (see serve_flags).
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.ray_serve.asgi_keys import BODY, SEND_TIMEOUT
from deployments.relay.client import RelayClient, RelayStream

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 200
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_OUR_PATHS = re.compile(r".*/(?:v1/.+|health(?:/\w+)?|tokenize|metrics|openapi\.json)")  # below any route_prefix
_SMALL_BODY = 64 * 1024
_BODY_WAIT_S = 0.05
_SERVE_SAYS = (404, 408, 429, 503)  # the statuses of Serve's own answers
_RETRY = (b"retry-after", b"1")
_TOO_LARGE = "Request header fields are too large: at most 200 headers and 64 KB in all."
_NOT_HERE = "The server is starting or shutting down. Please retry shortly."
_NOT_NOW = "The server cannot take the request now. Please retry shortly."
_CUT_SHORT = "The server stopped working on this request before it was complete."


class ProxyGuard:
    """Refuses oversized headers with 431; makes x-request-id well-formed, and single in the answer; lets no request
    for the OpenAI API end without an answer in OpenAI's shape."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._relay = RelayClient(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        kept = [(k, v) for k, v in headers if k != b"x-request-id"]
        given = [v for k, v in headers if k == b"x-request-id"]
        usable = len(given) == 1 and REQUEST_ID.fullmatch(given[0])
        request_id = given[0] if usable else b"req_" + uuid.uuid4().hex.encode()
        if len(headers) > MAX_HEADERS or sum(len(k) + len(v) for k, v in kept) > MAX_HEADER_BYTES:
            answer = _Answer(request_id, _Client(receive, send), ours=True)
            await answer.refuse(431, _envelope(_TOO_LARGE, "invalid_request_error"), (b"connection", b"close"))
            return
        client = _Client(receive, send)
        ours = _OUR_PATHS.fullmatch(scope["path"]) is not None
        answer = _Answer(request_id, client, ours)
        scope = {**scope, "headers": [*kept, (b"x-request-id", request_id)]}
        if ours and _has_small_body(headers) and (body := await client.body()) is not None:
            if (stream := self._relay.open(scope, body)) is not None:
                await _relayed(stream, client, answer)
                return
            scope[BODY] = body
        await self._app(scope, client.receive, answer.send)
        await answer.finish()


async def _relayed(stream: RelayStream, client: _Client, answer: _Answer) -> None:
    watch = asyncio.create_task(client.gone())
    watch.add_done_callback(lambda _: stream.stop())
    try:
        async for message in stream:
            await answer.send(message)
        if not watch.done():
            await answer.finish()
    finally:
        stream.close()
        watch.cancel()


def _has_small_body(headers: list[tuple[bytes, bytes]]) -> bool:
    lengths = [value for name, value in headers if name == b"content-length"]
    chunked = any(name == b"transfer-encoding" for name, _ in headers)
    return not chunked and len(lengths) == 1 and lengths[0].isdigit() and int(lengths[0][:10]) <= _SMALL_BODY


class _Client:
    """The client's end. One that takes nothing for `send_timeout_s` is reported to have left, upon which Serve cancels
    the request."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._listener: asyncio.Task[Any] | None = None
        self._gone = False
        self._ahead: list[MutableMapping[str, Any]] = []
        self.send_timeout_s: float | None = None

    async def body(self) -> bytes | None:
        """All of it, if it is there already or nearly so. If not, None: what has come is left for receive()."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_BODY_WAIT_S):
                while True:
                    message = await self._receive()
                    self._ahead.append(message)
                    if message["type"] != "http.request":
                        return None
                    if not message.get("more_body", False):
                        body = b"".join(part.get("body", b"") for part in self._ahead)
                        self._ahead.clear()
                        return body
        return None

    async def receive(self) -> MutableMapping[str, Any]:
        if self._ahead:
            return self._ahead.pop(0)
        self._listener = asyncio.current_task()
        try:
            if not self._gone:
                return await self._receive()
        except asyncio.CancelledError:
            if not self._gone or self._listener is None:
                raise
            self._listener.uncancel()
        finally:
            self._listener = None
        return {"type": "http.disconnect"}

    async def gone(self) -> None:
        """Returns when the client has left. Its body must have been read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if self._gone:
            return
        try:
            async with asyncio.timeout(self.send_timeout_s):
                await self._send(message)
        except TimeoutError:
            self._gone = True
            if self._listener is not None:
                self._listener.cancel()


class _Answer:
    """One answer on its way to the client."""

    def __init__(self, request_id: bytes, client: _Client, ours: bool) -> None:
        self._request_id = request_id
        self._client = client
        self._ours = ours
        self._begun = False
        self._ended = False
        self._events = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if self._ended:
            return  # what Serve still says of an answer that has been replaced
        if message["type"] == "http.response.start":
            headers = {k.lower(): v for k, v in message.get("headers", ())}
            kind = headers.get(b"content-type", b"")
            status = message["status"]
            if self._ours and status in _SERVE_SAYS and kind.startswith(b"text/plain"):
                text, status = (_NOT_HERE, 503) if status == 404 else (_NOT_NOW, status)
                retry = (b"retry-after", headers.get(b"retry-after", _RETRY[1]))
                await self.refuse(status, _envelope(text, "service_unavailable_error"), retry)
                return
            self._begun = True
            self._events = kind.startswith(b"text/event-stream")
            self._client.send_timeout_s = message.pop(SEND_TIMEOUT, None)
            rest = [(k, v) for k, v in message.get("headers", ()) if k.lower() != b"x-request-id"]
            message = {**message, "headers": [*rest, (b"x-request-id", self._request_id)]}
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
        await self._client.send(message)

    async def finish(self) -> None:
        """Serve has nothing more to say. A gateway that died has left the answer unfinished, or not begun it."""
        if self._ended or not self._ours:
            return
        body = _envelope(_CUT_SHORT, "server_error")
        if not self._begun:
            await self.refuse(503, body, _RETRY)
        elif self._events:
            await self.send({"type": "http.response.body", "body": b"data: " + body + b"\n\n"})

    async def refuse(self, status: int, body: bytes, header: tuple[bytes, bytes]) -> None:
        self._ended = True
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", self._request_id),
            header,
        ]
        await self._client.send({"type": "http.response.start", "status": status, "headers": headers})
        await self._client.send({"type": "http.response.body", "body": body})


def _envelope(message: str, kind: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}}).encode()


def middlewares() -> list[Middleware]:
    """What Serve's proxy wraps around itself."""
    return [Middleware(ProxyGuard)]

"""The first thing a request meets, and the last thing its answer passes: a small ASGI middleware inside Serve's proxy.

Serve's proxy copies a client's X-Request-Id into its own context and back into the answer unseen, and its HTTP
parser puts no bound on headers. It answers in plain text when it knows no application for a path (not deployed yet,
or being removed), and not at all when a gateway dies. All of that is mended here.
Enabled by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH (see serve_flags).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 200
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_OUR_PATHS = re.compile(r".*/(?:v1/.+|health(?:/\w+)?|tokenize|metrics)")  # below any route_prefix
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        kept = [(k, v) for k, v in headers if k != b"x-request-id"]
        given = [v for k, v in headers if k == b"x-request-id"]
        usable = len(given) == 1 and REQUEST_ID.fullmatch(given[0])
        request_id = given[0] if usable else b"req_" + uuid.uuid4().hex.encode()
        answer = _Answer(request_id, send, _OUR_PATHS.fullmatch(scope["path"]) is not None)
        if len(headers) > MAX_HEADERS or sum(len(k) + len(v) for k, v in kept) > MAX_HEADER_BYTES:
            await answer.refuse(431, _envelope(_TOO_LARGE, "invalid_request_error"), (b"connection", b"close"))
            return
        await self._app({**scope, "headers": [*kept, (b"x-request-id", request_id)]}, receive, answer.send)
        await answer.finish()


class _Answer:
    """One answer on its way to the client."""

    def __init__(self, request_id: bytes, send: Send, ours: bool) -> None:
        self._request_id = request_id
        self._send = send
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
            rest = [(k, v) for k, v in message.get("headers", ()) if k.lower() != b"x-request-id"]
            message = {**message, "headers": [*rest, (b"x-request-id", self._request_id)]}
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
        await self._send(message)

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
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _envelope(message: str, kind: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}}).encode()


def middlewares() -> list[Middleware]:
    """What Serve's proxy wraps around itself."""
    return [Middleware(ProxyGuard)]

"""A small ASGI middleware around Serve's own HTTP server: in its proxy, and behind HAProxy in each gateway.

It is there for what Serve does before a gateway is called, or without one:
* Serve copies a client's X-Request-Id into its own context and back into the answer unseen, and obeys headers that only
  its own parts should set.
* Its HTTP parser puts no bound on URLs and headers, and its proxy reads bodies without end before a gateway sees them.
* Serve answers in plain text when it knows no application for a path (not deployed yet, or being removed), and not at
  all when a gateway dies.
* Serve's proxy waits for ever for a client that stops reading, while the gateway goes on sending to the proxy.

What a middleware does not see, because a head is not complete, is bounded by head_bounds. Enabled by
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH (see flags).
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.ray_serve.head_bounds import bound_heads
from deployments.ray_serve.private import log_switch_faults
from deployments.ray_serve.refusals import CUT_SHORT, NOT_HERE, NOT_NOW, OUR_PATHS, RETRY_S, envelope
from deployments.ray_serve.request_head import (
    TOO_LARGE,
    URL_TOO_LONG,
    for_serve,
    request_id,
    too_large,
    url_too_long,
    with_request_id,
)

log = logging.getLogger("ray.serve")

SEND_TIMEOUT = "sluicegate.send_timeout_s"
"""A key of http.response.start that gateways set: for how many seconds the client may take nothing of this answer."""

_OUR_PATH = re.compile(OUR_PATHS)
_SERVE_SAYS = (404, 408, 429, 503)  # the statuses of Serve's own answers
_RETRY = (b"retry-after", RETRY_S.encode())
_MAX_BODY_BYTES = 256 * 2**20  # of any request; gateways allow less, see gateway.max_body_bytes, but see it too late
_BODY_TOO_LARGE = "The request body is too large: at most 256 MB."


class ProxyGuard:
    """Refuses oversized URLs with 414, headers with 431 and bodies with 413; makes x-request-id well-formed, and single
    in the answer; takes out headers that are Serve's own; lets no request for the OpenAI API end without an answer in
    OpenAI's shape."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        identity = request_id(headers)
        client = _Client(receive, send)
        answer = _GuardedAnswer(identity, client, ours=_OUR_PATH.fullmatch(scope["path"]) is not None)
        if refusal := _refusal(scope):
            status, text = refusal
            await answer.refuse(status, envelope(text, "invalid_request_error"), (b"connection", b"close"))
            return
        scope = {**scope, "headers": with_request_id(for_serve(headers), identity)}
        try:
            await self._app(scope, client.receive, answer.send)
        except Exception:
            if not answer.ours:
                raise
            log.exception("Serve failed on request %s", identity.decode())
        await answer.finish()


def _refusal(scope: Scope) -> tuple[int, str] | None:
    """Status and reason for a request that nobody behind the guard shall see."""
    if too_large(scope["headers"]):
        return 431, TOO_LARGE
    if url_too_long(scope):
        return 414, URL_TOO_LONG
    lengths = (value for name, value in scope["headers"] if name == b"content-length")
    if any(value.isdigit() and int(value[:20]) > _MAX_BODY_BYTES for value in lengths):
        return 413, _BODY_TOO_LARGE
    return None


class _Client:
    """The client's end. One that takes nothing for `send_timeout_s`, or sends more than _MAX_BODY_BYTES, is reported to
    have left, upon which Serve cancels the request."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._listener: asyncio.Task[Any] | None = None  # the task that waits in receive()
        self._gone = False
        self._body_bytes = 0
        self.send_timeout_s: float | None = None

    async def receive(self) -> Message:
        self._listener = asyncio.current_task()
        try:
            if not self._gone:
                message = await self._receive()
                self._body_bytes += len(message.get("body", b""))
                if self._body_bytes <= _MAX_BODY_BYTES:
                    return message
                self._gone = True
        except asyncio.CancelledError:
            if not self._gone or self._listener is None:
                raise
            self._listener.uncancel()
        finally:
            self._listener = None
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._gone:
            return
        try:
            async with asyncio.timeout(self.send_timeout_s):
                await self._send(message)
        except TimeoutError:
            self._gone = True
            if self._listener is not None:
                self._listener.cancel()


class _GuardedAnswer:
    """One answer on its way to the client. `ours`: of the OpenAI API, not of another application."""

    def __init__(self, identity: bytes, client: _Client, ours: bool) -> None:
        self._request_id = identity
        self._client = client
        self.ours = ours
        self._begun = False
        self._ended = False
        self._events = False

    async def send(self, message: Message) -> None:
        if self._ended:
            return  # what Serve still says of an answer that has been replaced
        if message["type"] == "http.response.start":
            headers = {k.lower(): v for k, v in message.get("headers", ())}
            kind = headers.get(b"content-type", b"")
            status = message["status"]
            if self.ours and status in _SERVE_SAYS and kind.startswith(b"text/plain"):
                text, status = (NOT_HERE, 503) if status == 404 else (NOT_NOW, status)
                retry = (b"retry-after", headers.get(b"retry-after", _RETRY[1]))
                await self.refuse(status, envelope(text, "service_unavailable_error"), retry)
                return
            self._begun = True
            self._events = kind.startswith(b"text/event-stream")
            self._client.send_timeout_s = message.pop(SEND_TIMEOUT, None)
            message = {**message, "headers": with_request_id(list(message.get("headers", ())), self._request_id)}
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
        await self._client.send(message)

    async def finish(self) -> None:
        """Serve has nothing more to say. A gateway that died has left the answer unfinished, or not begun it."""
        if self._ended or not self.ours:
            return
        body = envelope(CUT_SHORT, "server_error")
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


def middlewares() -> list[Middleware]:
    """What Serve's HTTP servers are wrapped in; called in the process of each."""
    log_switch_faults("HTTP proxy")
    bound_heads()
    return [Middleware(ProxyGuard)]

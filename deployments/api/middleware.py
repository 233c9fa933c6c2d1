"""The outermost layer of the ASGI app: request ids, common headers, errors that become answers, and the record of each
request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from itertools import count
from types import MappingProxyType

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.body import ClientGoneError
from deployments.api.errors import ApiError, from_exception, internal
from deployments.observe.request_log import CLIENT_GONE, RequestLog, RequestTrace
from deployments.ray_serve.request_head import TOO_LARGE, request_id, too_large

log = logging.getLogger(__name__)

_API_VERSION = "2020-10-01"
_UNLOGGED = ("/health", "/metrics")
# Of a refused request's body, which most clients send to its end before they look at the answer: how much is read and
# dropped, how long the client may pause meanwhile, and how long that may take. Beyond, the connection is closed.
_DRAIN_BYTES = 64 * 1024 * 1024
_DRAIN_IDLE_S = 2.0
_DRAIN_S = 10.0


class RequestMiddleware:
    """`on_finished` is called once per request, on the event loop, also for those that fail or whose client leaves;
    not for health checks and metrics. `direct`: by path, apps that get their POST requests from here, without what
    FastAPI does before it finds them."""

    def __init__(
        self,
        app: ASGIApp,
        on_finished: Callable[[RequestLog], None] | None = None,
        direct: Mapping[str, ASGIApp] = MappingProxyType({}),
    ) -> None:
        self._app = app
        self._direct = direct
        self._on_finished = on_finished
        self._numbers = count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises only after an answer has begun, so that the server cuts the connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        now = time.perf_counter()
        identity = request_id(scope["headers"]).decode("ascii")  # never a key below the gateway: clients may share one
        trace = RequestTrace(next(self._numbers), identity, scope["method"], scope["path"], now, now)
        scope["state"] = {**scope.get("state", {}), "trace": trace}
        body = _RequestBody(scope, receive)
        response = _Response(trace, send)
        try:
            _check_head(scope)
            await self._next(scope)(scope, body.receive, response.send)
        except ClientGoneError:
            trace.status = CLIENT_GONE
        except asyncio.CancelledError:
            trace.status = CLIENT_GONE
            raise
        except Exception as error:
            await _refuse(error, trace, body, response)
        finally:
            if self._on_finished is not None and not trace.path.startswith(_UNLOGGED):
                self._on_finished(trace.record(time.perf_counter()))

    def _next(self, scope: Scope) -> ASGIApp:
        if scope["method"] != "POST":
            return self._app
        return self._direct.get(scope["path"].removeprefix(scope.get("root_path", "")), self._app)


def trace_of(scope: Scope) -> RequestTrace:
    """The record in progress of a request that came through RequestMiddleware."""
    trace: RequestTrace = scope["state"]["trace"]
    return trace


class _RequestBody:
    """Watches the request body go by, to know whether the client is still sending."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self._ended = not any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._ended = True
        return message

    async def drain(self) -> bool:
        """Read and drop the rest, within bounds. False when there is still more."""
        size = 0
        try:
            async with asyncio.timeout(_DRAIN_S):
                while not self._ended and size <= _DRAIN_BYTES:
                    async with asyncio.timeout(_DRAIN_IDLE_S):
                        message = await self.receive()
                    size += len(message.get("body", b""))
        except TimeoutError:
            return False
        return self._ended


class _Response:
    """Adds the common headers to the answer on its way out."""

    def __init__(self, trace: RequestTrace, send: Send) -> None:
        self._trace = trace
        self._send = send
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            trace = self._trace
            trace.status = message["status"]
            elapsed_s = time.perf_counter() - trace.started_s
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = trace.request_id
            headers["openai-processing-ms"] = str(round(elapsed_s * 1000))
            headers["openai-version"] = _API_VERSION
            headers.update(trace.headers)
            if parts_s := trace.known_parts_s():
                parts = (f"{name};dur={seconds * 1000:.2f}" for name, seconds in parts_s.items())
                headers["server-timing"] = ", ".join(parts)
        await self._send(message)


def reported(error: Exception, trace: RequestTrace) -> ApiError:
    """What the client is told of `error`, noted in the request's record. Unforeseen errors go to the server's log."""
    answer = from_exception(error)
    if answer is None:
        log.error("request %s failed", trace.request_id, exc_info=error)
        answer = internal()
    trace.error = answer.code or answer.type
    return answer


async def _refuse(error: Exception, trace: RequestTrace, body: _RequestBody, response: _Response) -> None:
    answer = reported(error, trace)
    if response.started:
        raise error  # too late for another status: the server cuts the connection
    headers = dict(answer.headers)  # "connection: close" in them: the client's sending is not worth waiting for
    if headers.get("connection") != "close" and not await body.drain():
        headers["connection"] = "close"
    await send_json(response.send, answer.status, answer.body(), headers)


async def send_json(send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    """A whole answer whose `body` is JSON."""
    raw = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    raw += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _check_head(scope: Scope) -> None:
    """What HTTP servers let through but nobody honest sends. Raises ApiError; the connection is not to be trusted."""
    closing = {"connection": "close"}
    headers = scope["headers"]
    if too_large(headers):
        raise ApiError(431, TOO_LARGE, headers=closing)
    lengths = [value for name, value in headers if name == b"content-length"]
    chunked = any(name == b"transfer-encoding" for name, _ in headers)
    if len(lengths) + chunked > 1 or not all(value.isdigit() for value in lengths):
        raise ApiError(400, "The length of the request body is not clear from its headers.", headers=closing)

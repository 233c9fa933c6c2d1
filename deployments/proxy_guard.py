"""The first thing a request meets: a small ASGI middleware inside Serve's HTTP proxy.

Serve's proxy copies a client's X-Request-Id into its own context and back into the answer unseen, and its HTTP
parser puts no bound on headers. Both are fixed here, before any deployment is called.
Enabled by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH (see serve_flags).
"""

from __future__ import annotations

import re
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 200
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_TOO_LARGE = (
    b'{"error":{"message":"Request header fields are too large: at most 200 headers and 64 KB in all.",'
    b'"type":"invalid_request_error","param":null,"code":null}}'
)


class ProxyGuard:
    """Refuses oversized headers with 431; makes x-request-id well-formed, and single in the answer."""

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
        if len(headers) > MAX_HEADERS or sum(len(k) + len(v) for k, v in kept) > MAX_HEADER_BYTES:
            await _refuse(send, request_id)
            return

        async def once(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                rest = [(k, v) for k, v in message.get("headers", ()) if k.lower() != b"x-request-id"]
                message = {**message, "headers": [*rest, (b"x-request-id", request_id)]}
            await send(message)

        await self._app({**scope, "headers": [*kept, (b"x-request-id", request_id)]}, receive, once)


async def _refuse(send: Send, request_id: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(_TOO_LARGE)).encode()),
        (b"x-request-id", request_id),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 431, "headers": headers})
    await send({"type": "http.response.body", "body": _TOO_LARGE})


def middlewares() -> list[Middleware]:
    """What Serve's proxy wraps around itself."""
    return [Middleware(ProxyGuard)]

"""What it means when an upstream answers with another status than 200."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson

from deployments.observe.log import log
from deployments.upstream.errors import UpstreamBusyError, UpstreamDownError, UpstreamError, UpstreamRefusedError
from engine.errors import ContextLengthError

_MAX_BODY_BYTES = 64 * 1024  # of an error: a longer one is not read, only its status counts
_MAX_RETRY_AFTER_S = 3600.0
_TOO_LONG = "context_length_exceeded"
_MISTAKES = (400, 413, 422)  # the request's own fault


async def refusal(response: aiohttp.ClientResponse, name: str) -> UpstreamError | ContextLengthError:
    """The error to raise. `name` is the upstream's, for the log. Raises aiohttp's errors while it reads the body."""
    status, error = response.status, await _error_body(response)
    message, code = str(error.get("message") or "")[:500], error.get("code")
    if status in (429, 503):
        return UpstreamBusyError(f"status {status}", _retry_after_s(response))
    if status in _MISTAKES:
        if code == _TOO_LONG or "maximum context length" in message:
            return ContextLengthError(message, "messages")
        param = error.get("param")
        return UpstreamRefusedError(
            message or "The request was refused.",
            param if isinstance(param, str) else None,
            code if isinstance(code, str) else None,
        )
    log.warning("upstream %s answers %d: %s", name, status, message)
    return UpstreamDownError(f"status {status}")


async def _error_body(response: aiohttp.ClientResponse) -> dict[str, Any]:
    raw = b""
    async for chunk in response.content.iter_any():
        raw += chunk
        if len(raw) > _MAX_BODY_BYTES:
            return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}


def _retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    try:
        return min(max(float(response.headers["retry-after"]), 0.0), _MAX_RETRY_AFTER_S)
    except (KeyError, ValueError):
        return None

"""Asks one external server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from deployments.config.upstream import UpstreamConfig
from deployments.upstream.answer import Answer
from deployments.upstream.errors import (
    UpstreamBusyError,
    UpstreamDownError,
    UpstreamError,
    UpstreamRefusedError,
    UpstreamSlowError,
)
from deployments.upstream.events import EventParser, EventTooLargeError
from deployments.upstream.wires import Reply, wire
from engine.errors import ContextLengthError
from engine.types import TokenDelta

log = logging.getLogger("ray.serve")

_MAX_ERROR_BYTES = 64 * 1024
_TAIL_S = 0.1
_CONTEXT = "context_length_exceeded"
_MISTAKES = (400, 413, 422)


@dataclass(frozen=True, slots=True)
class UpstreamCall:
    """A client's request on its way out. `path` is behind the base URL. `fields` is the body as the client sent it,
    `max_tokens` what its answer may have here. Choice `i * n + j` belongs to `request_ids[i]`."""

    path: str
    fields: Mapping[str, Any]
    request_ids: Sequence[str]
    n: int
    max_tokens: int


class Upstream:
    """One external server. Lives on one event loop."""

    def __init__(self, config: UpstreamConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` replaces the network. Raises ValueError when its key is not to be had."""
        self.config = config
        self._wire = wire(config, transport)

    async def generate(self, call: UpstreamCall) -> AsyncGenerator[list[TokenDelta], None]:
        """Deltas without token ids. Ends normally only after the last delta of every choice. Raises UpstreamError and
        its kin, and ContextLengthError."""
        stream = self._answer(call)
        try:
            async with aclosing(stream):
                async with asyncio.timeout(self.config.first_token_s):
                    deltas = await anext(stream)
                yield deltas
                async for deltas in stream:
                    yield deltas
        except TimeoutError:
            raise UpstreamSlowError(f"upstream {self.config.name}: no first token") from None

    async def close(self) -> None:
        await self._wire.close()

    async def _answer(self, call: UpstreamCall) -> AsyncGenerator[list[TokenDelta], None]:
        body = orjson.dumps(self._body(call))
        async with self._wire.post(call.path, body) as reply:
            if reply.status != 200:
                raise await self._refusal(reply)
            if reply.headers.get("content-type", "").partition(";")[0].strip().lower() != "text/event-stream":
                raise UpstreamDownError("an answer that is no event stream")
            answer = Answer(call.request_ids, call.n)
            events, chunks = EventParser(), reply.chunks()
            async for chunk in chunks:
                try:
                    deltas = answer.read(events.feed(chunk))
                except EventTooLargeError as error:
                    raise UpstreamDownError(str(error)) from None
                if deltas:
                    yield deltas
                if answer.fault is not None:
                    raise answer.fault
                if answer.done:
                    break
            try:
                yield answer.finish()
            finally:
                if answer.done:
                    await _read_out(chunks)

    def _body(self, call: UpstreamCall) -> dict[str, Any]:
        fields = {name: value for name, value in call.fields.items() if name not in self.config.dropped}
        limit = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
        model = str(fields.get("model"))
        return {
            **fields,
            limit: call.max_tokens,
            "model": self.config.models.get(model, model),
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _refusal(self, reply: Reply) -> UpstreamError | ContextLengthError:
        """What a status other than 200 means."""
        status, error = reply.status, await _error_body(reply)
        message, code = str(error.get("message") or "")[:500], error.get("code")
        if status in (429, 503):
            return UpstreamBusyError(f"status {status}", _retry_after_s(reply))
        if status in _MISTAKES:
            if code == _CONTEXT or "maximum context length" in message:
                return ContextLengthError(message, "messages")
            param = error.get("param")
            return UpstreamRefusedError(
                message or "The request was refused.",
                param if isinstance(param, str) else None,
                code if isinstance(code, str) else None,
            )
        log.warning("upstream %s answers %d: %s", self.config.name, status, message)
        return UpstreamDownError(f"status {status}")


async def _read_out(chunks: AsyncIterator[bytes]) -> None:
    """What follows [DONE] is nothing but the end of the body, and with that the connection can be used again."""
    with suppress(TimeoutError, UpstreamError):
        async with asyncio.timeout(_TAIL_S):
            async for _ in chunks:
                pass


async def _error_body(reply: Reply) -> dict[str, Any]:
    raw = b""
    async for chunk in reply.chunks():
        raw += chunk
        if len(raw) > _MAX_ERROR_BYTES:
            return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}


def _retry_after_s(reply: Reply) -> float | None:
    try:
        return min(max(float(reply.headers["retry-after"]), 0.0), 3600.0)
    except (KeyError, ValueError):
        return None

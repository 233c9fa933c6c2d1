"""One streamed completion, timed as its pieces come."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any, Literal

import orjson

from deployments.upstream.events import DONE, EventParser
from load_tests.errors import LoadError
from load_tests.http1 import Origin, ProtocolError
from load_tests.outcome import RequestOutcome

_MAX_ERROR_BODY = 65536


def v1(base_url: str) -> str:
    base = base_url.rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


class Endpoint:
    """The completions or chat of one model at one base URL (with or without /v1).

    `extensions`: body fields that a server may refuse; calibrate() takes those away."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str = "",
        api_key: str | None = None,
        kind: Literal["completions", "chat"] = "completions",
        body: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        keep_alive: bool = True,
    ) -> None:
        """Raises LoadError for a bad address."""
        self.base_url = v1(base_url)
        self.model = model
        self.kind = kind
        self.extensions: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}
        self._origin = Origin(self.base_url, keep_alive=keep_alive)
        self._root = "/" + self.base_url.split("://", 1)[1].partition("/")[2]
        self._path = self._root + ("/chat/completions" if kind == "chat" else "/completions")
        self._body = dict(body or {})
        self._timeout_s = timeout_s
        self._headers = f"Host: {self._origin.host_header}\r\nUser-Agent: sluicegate-load-tests\r\n"
        if api_key:
            if not api_key.isprintable() or not api_key.isascii():
                raise LoadError("the API key holds characters that no HTTP header takes")
            self._headers += f"Authorization: Bearer {api_key}\r\n"
        if not keep_alive:
            self._headers += "Connection: close\r\n"

    def close(self) -> None:
        self._origin.close()

    def prepare(self, prompt: bytes, max_tokens: int) -> bytes:
        """The whole request. `prompt`: JSON; for chat, the list of messages."""
        field = "messages" if self.kind == "chat" else "prompt"
        fixed = orjson.dumps({"model": self.model, "stream": True} | self._body | self.extensions)
        return self._post(self._path, b'%b,"max_tokens":%d,"%b":%b}' % (fixed[:-1], max_tokens, field.encode(), prompt))

    async def send(self, request: bytes, outcome: RequestOutcome) -> None:
        """Fills `outcome`, whose `due` is given. Never raises but for cancellation: failures are outcomes."""
        reader = _StreamReader(outcome)
        outcome.sent = outcome.end = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._origin.request(request, reader)
            reader.finish()
        except TimeoutError:
            outcome.error = "timeout"
        except (OSError, ValueError) as error:
            outcome.error = outcome.error or _kind_of(error)
        if outcome.error is not None:
            outcome.end = time.perf_counter()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Below the base URL. Raises OSError."""
        return await self._whole(f"GET {self._root}{path} HTTP/1.1\r\n{self._headers}\r\n".encode())

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """At the server's root, where servers keep what is not OpenAI's. Raises OSError."""
        return await self._whole(self._post(self._root.removesuffix("/v1") + path, orjson.dumps(body)))

    def _post(self, path: str, body: bytes) -> bytes:
        head = (
            f"POST {path} HTTP/1.1\r\n{self._headers}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _whole(self, request: bytes) -> tuple[int, bytes]:
        pieces: list[bytes] = []
        last_status = 0

        def receive(status: int, piece: bytes, at: float) -> None:
            nonlocal last_status
            last_status = status
            pieces.append(piece)

        async with asyncio.timeout(self._timeout_s):
            await self._origin.request(request, receive)
        return last_status, b"".join(pieces)


class _StreamReader:
    """Takes an answer apart as it comes: events of a stream, or the body of a refusal."""

    def __init__(self, outcome: RequestOutcome) -> None:
        self._outcome = outcome
        self._events = EventParser()
        self._refusal = b""
        self._status = 0
        self._finished = False

    def __call__(self, status: int, piece: bytes, at: float) -> None:
        self._status = status
        self._outcome.end = at
        if status != 200:
            self._refusal = (self._refusal + piece)[:_MAX_ERROR_BODY]
            return
        for data in self._events.feed(piece):
            self._event(data, at)

    def finish(self) -> None:
        """The answer is complete."""
        outcome = self._outcome
        if self._status != 200:
            outcome.error = f"http {self._status} {_message(self._refusal)}".strip() if self._status else "empty answer"
        elif outcome.error is None and not (self._finished and outcome.events):
            outcome.error = "stream ended early" if outcome.events else "no tokens"

    def _event(self, data: bytes, at: float) -> None:
        if data == DONE:
            self._finished = True
            return
        event, outcome = orjson.loads(data), self._outcome
        if not isinstance(event, dict):
            raise ValueError("an event that is no object")
        if error := event.get("error"):
            outcome.error = f"error event {_name_of(error)}".strip()
            return
        if usage := event.get("usage"):
            outcome.prompt_tokens = usage.get("prompt_tokens")
            outcome.output_tokens = usage.get("completion_tokens")
            outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        for choice in event.get("choices") or ():
            text = _text_of(choice)
            ended = choice.get("finish_reason") is not None
            self._finished |= ended
            if text or (ended and not outcome.events):
                outcome.events.append(at)
                if text and outcome.text is not None:
                    outcome.text.append(text)


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def _kind_of(error: Exception) -> str:
    if isinstance(error, ProtocolError):
        return "not an HTTP/1.1 answer"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionError):
        return "connection lost"
    if isinstance(error, ssl.SSLError):
        return "TLS failed"
    if isinstance(error, socket.gaierror):
        return "unknown host"
    if isinstance(error, OSError):
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return "too many open files (raise ulimit -n)"
        return f"cannot connect ({errno.errorcode.get(error.errno or 0, 'unknown')})"
    return "malformed event"


def _message(body: bytes) -> str:
    try:
        return _name_of(orjson.loads(body).get("error"))
    except (orjson.JSONDecodeError, AttributeError):
        return ""


def _name_of(error: object) -> str:
    """A short, groupable name of an error object: its code or type, not its message."""
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "")
    return str(error or "")[:60]

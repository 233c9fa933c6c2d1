"""One streamed completion, timed token by token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are seconds of time.perf_counter(). `due`: when it should have been sent;
    latencies count from there, so that a late client never flatters the server. `events`: when text arrived."""

    due: float
    sent: float = 0.0
    end: float = 0.0
    events: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.events[0] - self.due

    @property
    def e2e_s(self) -> float:
        return self.end - self.due


class Endpoint:
    """The completions of one model at one base URL (with or without /v1)."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, model: str, timeout_s: float) -> None:
        self._session = session
        self._url = f"{v1(base_url)}/completions"
        self._model = model
        self._timeout_s = timeout_s
        # Extensions, given up one after the other by negotiate() when a server refuses them.
        self.extensions: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}

    async def negotiate(self, prompt: str) -> Outcome:
        """One short request; learns which extensions the server takes. The outcome may be an error."""
        for dropped in ("ignore_eos", "stream_options", None):
            outcome = await self.complete(prompt, 1, time.perf_counter())
            if dropped is None or not (outcome.error or "").startswith(("http 400", "http 422")):
                break
            self.extensions.pop(dropped)
        return outcome

    async def complete(self, prompt: str, max_tokens: int, due: float) -> Outcome:
        """Never raises but for cancellation: failures are outcomes."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        outcome = Outcome(due, sent=time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(body | self.extensions, outcome)
        except TimeoutError:
            outcome.error = "timeout"
        except aiohttp.ClientConnectorError:
            outcome.error = "connection refused"
        except (aiohttp.ClientError, ConnectionError) as error:
            outcome.error = f"connection lost ({type(error).__name__})"
        outcome.end = time.perf_counter()
        return outcome

    async def _stream(self, body: Mapping[str, Any], outcome: Outcome) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=orjson.dumps(body), headers=headers) as answer:
            if answer.status != 200:
                outcome.error = f"http {answer.status} {_message(await answer.read())}".strip()
                return
            finished = False
            async for data, at in _events(answer.content):
                if data == b"[DONE]":
                    finished = True
                    continue
                finished |= _take(orjson.loads(data), at, outcome)
            if outcome.error is None and not (finished and outcome.events):
                outcome.error = "stream ended early" if outcome.events else "no tokens"


def v1(base_url: str) -> str:
    base = base_url.rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


def _take(event: dict[str, Any], at: float, outcome: Outcome) -> bool:
    """Records one event; True when it says that the completion is over."""
    if error := event.get("error"):
        outcome.error = f"error event {_text(error)}"
        return True
    if usage := event.get("usage"):
        outcome.prompt_tokens = usage.get("prompt_tokens")
        outcome.output_tokens = usage.get("completion_tokens")
    finished = False
    for choice in event.get("choices") or ():
        finished |= choice.get("finish_reason") is not None
        if choice.get("text") or (finished and not outcome.events):
            outcome.events.append(at)
    return finished


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[bytes, float]]:
    """The data of each server-sent event, and when its last byte had come."""
    rest = b""
    async for chunk in content.iter_any():
        at = time.perf_counter()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip(), at


def _message(body: bytes) -> str:
    try:
        return _text(orjson.loads(body).get("error"))
    except (orjson.JSONDecodeError, AttributeError):
        return ""


def _text(error: object) -> str:
    """A short, groupable name of an error object: its code or type, not its message."""
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "")
    return str(error or "")[:60]

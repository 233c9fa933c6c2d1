"""An upstream's chunks as deltas. Nothing in them is believed before it has been looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from deployments.upstream.errors import UpstreamDownError, UpstreamError, UpstreamRefusedError, UpstreamUnreadError
from deployments.upstream.events import DONE
from engine.types import FinishReason, TokenDelta

# OpenAI's words, and those of servers that have others. Compared in lower case.
_STOPPED = ("stop", "eos", "eos_token", "end_turn", "stop_sequence", "complete")
_CUT = ("length", "model_length", "max_tokens")
_REASONS = dict.fromkeys(_STOPPED, FinishReason.STOP) | dict.fromkeys(_CUT, FinishReason.LENGTH)
_CALLS = ("tool_calls", "function_call")


@dataclass(slots=True)
class _Choice:
    request_id: str
    index: int
    num_chunks: int = 0
    parts: list[str] = field(default_factory=list)  # text that is in no delta yet
    reason: FinishReason | None = None


class UpstreamAnswer:
    """One streamed answer, chat or completion. The last deltas wait for the usage, which upstreams send after them:
    until then each chunk counts as one token."""

    def __init__(self, request_ids: Sequence[str], n: int) -> None:
        self._choices = [_Choice(request_id, index) for request_id in request_ids for index in range(n)]
        self._usage: dict[str, Any] = {}
        self.done = False  # by the upstream's word
        self.fault: UpstreamError | None = None

    @property
    def complete(self) -> bool:
        """Whether every choice has been ended by the upstream."""
        return all(choice.reason is not None for choice in self._choices)

    def read(self, batch: Sequence[bytes]) -> list[TokenDelta]:
        """The text of some events, at most one delta per choice. Reads as far as they are good: then `fault` is
        UpstreamDownError for what is no chunk, UpstreamRefusedError for content it will not go on with, or
        UpstreamUnreadError."""
        for payload in batch:
            if payload.strip() == DONE:
                self.done = True
                break
            try:
                self._read(payload)
            except UpstreamError as fault:
                self.fault = fault
                break
        return [_said(choice) for choice in self._choices if choice.parts]

    def _read(self, payload: bytes) -> None:
        chunk = _object(payload)
        if (error := chunk.get("error")) is not None:
            raise UpstreamDownError(f"an error event: {str(error)[:200]}")
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = usage
        entries = chunk.get("choices")
        if not isinstance(entries, list):
            raise UpstreamDownError("a chunk without choices")
        for entry in entries:
            self._hear(entry)

    def finish(self) -> list[TokenDelta]:
        """The last delta of each choice. Raises UpstreamDownError when one has not been ended."""
        if not self.complete:
            raise UpstreamDownError("the answer broke off")
        prompt, cached = _count(self._usage, "prompt_tokens"), _count(self._details(), "cached_tokens")
        last = self._choices[-1]
        others = sum(choice.num_chunks for choice in self._choices[:-1])
        if total := _count(self._usage, "completion_tokens"):
            last.num_chunks = max(total - others, 0)
        return [
            replace(_said(choice), finish_reason=choice.reason, num_prompt_tokens=prompt, num_cached_tokens=cached)
            for choice in self._choices
        ]

    def _details(self) -> dict[str, Any]:
        details = self._usage.get("prompt_tokens_details")
        return details if isinstance(details, dict) else {}

    def _hear(self, entry: Any) -> None:
        at = entry.get("index") if isinstance(entry, dict) else None
        if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < len(self._choices):
            raise UpstreamDownError("a choice that was not asked for")
        choice = self._choices[at]
        message = entry.get("delta", {"content": entry.get("text")})
        text = message.get("content") if isinstance(message, dict) else message
        if text is not None and not isinstance(text, str):
            raise UpstreamDownError("a choice whose text is none")
        if text and choice.reason is not None:
            raise UpstreamDownError("text after the end")
        if (reason := entry.get("finish_reason")) is not None:
            choice.reason = _reason(reason)
        if text:
            choice.num_chunks += 1
            choice.parts.append(text)


def _said(choice: _Choice) -> TokenDelta:
    text = "".join(choice.parts)
    choice.parts.clear()
    return TokenDelta(choice.request_id, choice.index, text=text, num_completion_tokens=choice.num_chunks)


def _reason(value: Any) -> FinishReason:
    if value == "content_filter":
        raise UpstreamRefusedError("The answer was stopped by a content filter.", None, "content_filter")
    if value in _CALLS:
        raise UpstreamUnreadError("The answer is a tool call, which this model's server cannot pass on.")
    reason = _REASONS.get(str(value).lower())
    if reason is None:
        raise UpstreamUnreadError(f"The answer ended for a reason that is not known here: {str(value)[:50]!r}.")
    return reason


def _object(payload: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(payload)
    except orjson.JSONDecodeError:
        raise UpstreamDownError("an event that is not JSON") from None
    if not isinstance(value, dict):
        raise UpstreamDownError("an event that is no chunk")
    return value


def _count(where: dict[str, Any], name: str) -> int:
    value = where.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

"""What chat and completions answers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from deployments.api.requests import PreparedRequest
from deployments.api.token_text import token_bytes, token_string
from engine.text import TextModel
from engine.types import TokenDelta, TokenLogprob

Payload = dict[str, Any]


class ChunkBuilder(ABC):
    """Makes the chunks of one request's stream, ready for JSON, from its deltas in order. `kind`: their `object`."""

    def __init__(self, prepared: PreparedRequest, kind: str) -> None:
        self._prepared = prepared
        self._head = head(prepared, kind)
        self._tail: Payload = {"usage": None} if prepared.include_usage else {}

    @abstractmethod
    def add(self, choice: int, delta: TokenDelta) -> list[Payload]:
        """The chunks that say what `delta` brings for the choice of this number; none when it must wait."""

    def usage(self, usage: Payload) -> Payload:
        """The extra last chunk of include_usage."""
        return {**self._head, "choices": [], "usage": usage}

    def _chunk(self, choice: Payload) -> Payload:
        return {**self._head, "choices": [choice], **self._tail}


BodyBuilder = Callable[[PreparedRequest, Sequence[Sequence[TokenDelta]], Payload], Payload]
"""Makes the body of an answer that is not streamed: of the request, every choice's deltas, and the usage."""


def head(prepared: PreparedRequest, kind: str) -> Payload:
    """The fields every body and chunk begins with."""
    return {
        "id": prepared.id,
        "object": kind,
        "created": prepared.created,
        "model": prepared.model.id,
        "system_fingerprint": prepared.model.fingerprint,
    }


def text_of(deltas: Sequence[TokenDelta]) -> str:
    """All of one choice's text."""
    return "".join(delta.text for delta in deltas)


def logprobs_of(deltas: Sequence[TokenDelta]) -> list[TokenLogprob]:
    """One entry for each token of one choice."""
    return [entry for delta in deltas for entry in delta.logprobs]


def prompt_logprobs_of(deltas: Sequence[TokenDelta]) -> Sequence[TokenLogprob | None]:
    """One entry for each token of the prompt, None for the first; empty in all choices of a request but the first."""
    return next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), ())


def prompt_logprobs_by_id(text: TextModel, entries: Sequence[TokenLogprob | None], k: int) -> list[Payload | None]:
    """The `prompt_logprobs` extension: for each prompt token a map from token id to its logprob and text."""
    return [None if entry is None else _by_id(text, entry, k) for entry in entries]


def _by_id(text: TextModel, entry: TokenLogprob, k: int) -> Payload:
    pairs = {entry.token_id: entry.logprob, **dict(entry.top[:k])}
    return {
        str(token_id): {"logprob": logprob, "decoded_token": token_string(token_bytes(text, token_id))}
        for token_id, logprob in pairs.items()
    }

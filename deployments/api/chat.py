"""Chat completion objects and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.api.progress import FINISH
from deployments.api.requests import PreparedRequest
from deployments.api.responses import (
    ChunkBuilder,
    Payload,
    head,
    logprobs_of,
    prompt_logprobs_by_id,
    prompt_logprobs_of,
    text_of,
)
from deployments.api.token_text import token_bytes, token_string
from engine.text import TextModel
from engine.types import TokenDelta, TokenLogprob


def chat_body(prepared: PreparedRequest, choices: Sequence[Sequence[TokenDelta]], usage: Payload) -> Payload:
    """A chat.completion object. `choices`: the deltas of each."""
    body = head(prepared, "chat.completion")
    body["service_tier"] = prepared.tier
    body["choices"] = [_choice(prepared, i, deltas) for i, deltas in enumerate(choices)]
    body["usage"] = usage
    if prepared.prompt_logprobs is not None:
        entries = prompt_logprobs_of(choices[0])
        body["prompt_logprobs"] = prompt_logprobs_by_id(prepared.model.text, entries, prepared.prompt_logprobs)
    return body


class ChatChunkBuilder(ChunkBuilder):
    """Per choice: the role, then content, then an empty delta with the finish_reason."""

    def __init__(self, prepared: PreparedRequest) -> None:
        super().__init__(prepared, "chat.completion.chunk")
        self._head["service_tier"] = prepared.tier
        self._begun: set[int] = set()

    def add(self, choice: int, delta: TokenDelta) -> list[Payload]:
        """See ChunkBuilder."""
        chunks = []
        if choice not in self._begun:
            self._begun.add(choice)
            chunks.append(self._delta(choice, {"role": "assistant", "content": "", "refusal": None}))
        if delta.text or delta.logprobs:
            logprobs = _logprobs(self._prepared, delta.logprobs)
            chunks.append(self._delta(choice, {"content": delta.text}, logprobs))
        if delta.finish_reason is not None:
            chunks.append(self._delta(choice, {}, None, FINISH[delta.finish_reason]))
        return chunks

    def _delta(
        self, choice: int, delta: Payload, logprobs: Payload | None = None, finish: str | None = None
    ) -> Payload:
        return self._chunk({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish})


def _choice(prepared: PreparedRequest, index: int, deltas: Sequence[TokenDelta]) -> Payload:
    reason = deltas[-1].finish_reason
    message: Payload = {"role": "assistant", "content": text_of(deltas), "refusal": None, "annotations": []}
    logprobs = _logprobs(prepared, logprobs_of(deltas))
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason and FINISH[reason]}


def _logprobs(prepared: PreparedRequest, entries: Sequence[TokenLogprob]) -> Payload | None:
    if prepared.logprobs is None:
        return None
    return {"content": [_token(prepared.model.text, entry, prepared.logprobs) for entry in entries], "refusal": None}


def _token(text: TextModel, entry: TokenLogprob, k: int) -> Payload:
    top = [_pair(text, token_id, logprob) for token_id, logprob in entry.top[:k]]
    return {**_pair(text, entry.token_id, entry.logprob), "top_logprobs": top}


def _pair(text: TextModel, token_id: int, logprob: float) -> dict[str, Any]:
    raw = token_bytes(text, token_id)
    return {"token": token_string(raw), "logprob": logprob, "bytes": list(raw)}

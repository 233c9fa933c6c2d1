"""Chat completion objects and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.api.choices import (
    Payload,
    head,
    logprobs_of,
    prompt_logprobs_by_id,
    prompt_logprobs_of,
    text_of,
)
from deployments.api.progress import FINISH
from deployments.api.requests import Job
from deployments.api.token_text import shown, token_bytes
from engine.text import TextModel
from engine.types import TokenDelta, TokenLogprob


class ChatForm:
    """See answer.Form."""

    def stream(self, job: Job) -> ChatChunks:
        return ChatChunks(job)

    def whole(self, job: Job, choices: Sequence[Sequence[TokenDelta]], usage: Payload) -> Payload:
        body = head(job, "chat.completion")
        body["service_tier"] = job.tier
        body["choices"] = [_choice(job, i, deltas) for i, deltas in enumerate(choices)]
        body["usage"] = usage
        if job.prompt_logprobs is not None:
            entries = prompt_logprobs_of(choices[0])
            body["prompt_logprobs"] = prompt_logprobs_by_id(job.model.text, entries, job.prompt_logprobs)
        return body


class ChatChunks:
    """See answer.Chunks. Per choice: the role, then content, then an empty delta with the finish_reason."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._head = head(job, "chat.completion.chunk")
        self._head["service_tier"] = job.tier
        self._tail: Payload = {"usage": None} if job.include_usage else {}
        self._begun: set[int] = set()

    def of(self, choice: int, delta: TokenDelta) -> list[Payload]:
        chunks = []
        if choice not in self._begun:
            self._begun.add(choice)
            chunks.append(self._chunk(choice, {"role": "assistant", "content": "", "refusal": None}))
        if delta.text or delta.logprobs:
            logprobs = _logprobs(self._job, delta.logprobs)
            chunks.append(self._chunk(choice, {"content": delta.text}, logprobs))
        if delta.finish_reason is not None:
            chunks.append(self._chunk(choice, {}, None, FINISH[delta.finish_reason]))
        return chunks

    def usage(self, usage: Payload) -> Payload:
        return {**self._head, "choices": [], "usage": usage}

    def _chunk(
        self, choice: int, delta: Payload, logprobs: Payload | None = None, finish: str | None = None
    ) -> Payload:
        entry = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "choices": [entry], **self._tail}


def _choice(job: Job, index: int, deltas: Sequence[TokenDelta]) -> Payload:
    reason = deltas[-1].finish_reason
    message: Payload = {"role": "assistant", "content": text_of(deltas), "refusal": None, "annotations": []}
    logprobs = _logprobs(job, logprobs_of(deltas))
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason and FINISH[reason]}


def _logprobs(job: Job, entries: Sequence[TokenLogprob]) -> Payload | None:
    if job.logprobs is None:
        return None
    return {"content": [_token(job.model.text, entry, job.logprobs) for entry in entries], "refusal": None}


def _token(text: TextModel, entry: TokenLogprob, k: int) -> Payload:
    top = [_pair(text, token_id, logprob) for token_id, logprob in entry.top[:k]]
    return {**_pair(text, entry.token_id, entry.logprob), "top_logprobs": top}


def _pair(text: TextModel, token_id: int, logprob: float) -> dict[str, Any]:
    raw = token_bytes(text, token_id)
    return {"token": shown(raw), "logprob": logprob, "bytes": list(raw)}

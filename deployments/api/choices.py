"""What chat and completions answers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from deployments.api.requests import Job
from deployments.api.token_text import shown, token_bytes
from engine.text import TextModel
from engine.types import TokenDelta, TokenLogprob

Payload = dict[str, Any]


class Chunks(Protocol):
    """The stream form of one job's answer. Deltas go in, in order; JSON-ready chunks come out."""

    def of(self, choice: int, delta: TokenDelta) -> list[Payload]: ...

    def usage(self, usage: Payload) -> Payload:
        """The extra last chunk of include_usage."""
        ...


class Form(Protocol):
    """How an endpoint words its answers."""

    def stream(self, job: Job) -> Chunks: ...

    def whole(self, job: Job, choices: Sequence[Sequence[TokenDelta]], usage: Payload) -> Payload:
        """The plain body. `choices[i]`: every delta of choice i."""
        ...


def head(job: Job, kind: str) -> Payload:
    """The fields every body and chunk begins with."""
    return {
        "id": job.id,
        "object": kind,
        "created": job.created,
        "model": job.model.id,
        "system_fingerprint": job.model.fingerprint,
    }


def text_of(deltas: Sequence[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def logprobs_of(deltas: Sequence[TokenDelta]) -> list[TokenLogprob]:
    return [entry for delta in deltas for entry in delta.logprobs]


def prompt_logprobs_of(deltas: Sequence[TokenDelta]) -> Sequence[TokenLogprob | None]:
    return next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), ())


def prompt_logprobs_by_id(text: TextModel, entries: Sequence[TokenLogprob | None], k: int) -> list[Payload | None]:
    """The `prompt_logprobs` extension: for each prompt token a map from token id to its logprob and text."""
    return [None if entry is None else _by_id(text, entry, k) for entry in entries]


def _by_id(text: TextModel, entry: TokenLogprob, k: int) -> Payload:
    pairs = {entry.token_id: entry.logprob, **dict(entry.top[:k])}
    return {
        str(token_id): {"logprob": logprob, "decoded_token": shown(token_bytes(text, token_id))}
        for token_id, logprob in pairs.items()
    }

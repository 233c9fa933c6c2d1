"""Text completion objects and chunks, with echo."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

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
from deployments.api.token_text import Echo, Offsets, shown, token_bytes
from engine.types import TokenDelta, TokenLogprob

_KIND = "text_completion"
_Row = tuple[int, TokenLogprob | None]


class CompletionForm:
    """See answer.Form."""

    def stream(self, job: Job) -> CompletionChunks:
        return CompletionChunks(job)

    def whole(self, job: Job, choices: Sequence[Sequence[TokenDelta]], usage: Payload) -> Payload:
        body = head(job, _KIND)
        body["choices"] = [_choice(job, i, choices) for i in range(len(choices))]
        body["usage"] = usage
        return body


class CompletionChunks:
    """See answer.Chunks. A choice's echo comes before its first text; with logprobs it needs those of the prompt, which
    come with the request's first choice: deltas of the other choices wait for them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._head = head(job, _KIND)
        self._tail: Payload = {"usage": None} if job.include_usage else {}
        self._offsets: dict[int, Offsets] = {}
        self._prompts: dict[int, Sequence[TokenLogprob | None]] = {}
        self._waiting: dict[int, list[tuple[int, TokenDelta]]] = {}

    def of(self, choice: int, delta: TokenDelta) -> list[Payload]:
        if not self._job.echoes or self._job.logprobs is None:
            return self._chunks(choice, delta)
        request = choice // self._job.n
        if request not in self._prompts:
            if delta.index != 0:
                self._waiting.setdefault(request, []).append((choice, delta))
                return []
            self._prompts[request] = delta.prompt_logprobs
        chunks = self._chunks(choice, delta)
        for late in self._waiting.pop(request, ()):
            chunks += self._chunks(*late)
        return chunks

    def usage(self, usage: Payload) -> Payload:
        return {**self._head, "choices": [], "usage": usage}

    def _chunks(self, choice: int, delta: TokenDelta) -> list[Payload]:
        chunks = []
        if choice not in self._offsets:
            self._offsets[choice] = _offsets(self._job)
            if self._job.echoes:
                request = choice // self._job.n
                repeated = self._job.echoes[request]
                rows = _prompt_rows(repeated, self._prompts.get(request, ()))
                chunks.append(self._chunk(choice, repeated.text, rows))
        if delta.text or delta.logprobs:
            chunks.append(self._chunk(choice, delta.text, ((entry.token_id, entry) for entry in delta.logprobs)))
        if delta.finish_reason is not None:
            chunks.append(self._chunk(choice, "", None, FINISH[delta.finish_reason]))
        return chunks

    def _chunk(self, choice: int, text: str, rows: Iterable[_Row] | None, finish: str | None = None) -> Payload:
        logprobs = None if rows is None else _logprobs(self._job, rows, self._offsets[choice])
        entry = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "choices": [entry], **self._tail}


def _choice(job: Job, index: int, choices: Sequence[Sequence[TokenDelta]]) -> Payload:
    deltas = choices[index]
    request = index // job.n
    scored = prompt_logprobs_of(choices[request * job.n])  # the first choice's deltas carry them for all
    rows: list[_Row] = [(entry.token_id, entry) for entry in logprobs_of(deltas)]
    text = text_of(deltas)
    if job.echoes:
        rows = [*_prompt_rows(job.echoes[request], scored), *rows]
        text = job.echoes[request].text + text
    reason = deltas[-1].finish_reason
    entry: Payload = {
        "index": index,
        "text": text,
        "logprobs": _logprobs(job, rows, _offsets(job)),
        "finish_reason": reason and FINISH[reason],
    }
    if job.prompt_logprobs is not None:
        entry["prompt_logprobs"] = prompt_logprobs_by_id(job.model.text, scored, job.prompt_logprobs)
    return entry


def _offsets(job: Job) -> Offsets:
    return Offsets(job.model.text, job.requests[0].sampling.skip_special_tokens)


def _prompt_rows(repeated: Echo, scored: Sequence[TokenLogprob | None]) -> Iterable[_Row]:
    return zip_longest(repeated.ids, scored[: len(repeated.ids)])


def _logprobs(job: Job, rows: Iterable[_Row], offsets: Offsets) -> Payload | None:
    if job.logprobs is None:
        return None
    text = job.model.text
    tokens, token_logprobs, top_logprobs, text_offset = [], [], [], []
    for token_id, entry in rows:
        token = shown(token_bytes(text, token_id))
        tokens.append(token)
        token_logprobs.append(None if entry is None else entry.logprob)
        text_offset.append(offsets.next(token_id))
        top_logprobs.append(None if entry is None else _top(job, token, entry))
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": text_offset,
    }


def _top(job: Job, token: str, entry: TokenLogprob) -> dict[str, float]:
    """The best tokens and the chosen one. Of two tokens with one spelling the likelier stays."""
    top: dict[str, float] = {}
    for token_id, logprob in entry.top[: job.logprobs]:
        top.setdefault(shown(token_bytes(job.model.text, token_id)), logprob)
    top.setdefault(token, entry.logprob)
    return top

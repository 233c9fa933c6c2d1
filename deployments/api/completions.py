"""Text completion objects and chunks, with echo."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

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
from deployments.api.token_text import Echo, Offsets, token_bytes, token_string
from engine.types import TokenDelta, TokenLogprob

_KIND = "text_completion"
_Row = tuple[int, TokenLogprob | None]


def completion_body(prepared: PreparedRequest, choices: Sequence[Sequence[TokenDelta]], usage: Payload) -> Payload:
    """A text_completion object. `choices`: the deltas of each."""
    body = head(prepared, _KIND)
    body["choices"] = [_choice(prepared, i, choices) for i in range(len(choices))]
    body["usage"] = usage
    return body


class CompletionChunkBuilder(ChunkBuilder):
    """A choice's echo comes before its first text. With logprobs it needs those of the prompt, which come with the
    request's first choice: deltas of the other choices wait for them."""

    def __init__(self, prepared: PreparedRequest) -> None:
        super().__init__(prepared, _KIND)
        self._offsets: dict[int, Offsets] = {}
        self._prompts: dict[int, Sequence[TokenLogprob | None]] = {}
        self._waiting: dict[int, list[tuple[int, TokenDelta]]] = {}

    def add(self, choice: int, delta: TokenDelta) -> list[Payload]:
        """See ChunkBuilder."""
        if not self._prepared.echoes or self._prepared.logprobs is None:
            return self._chunks(choice, delta)
        request = choice // self._prepared.n
        if request not in self._prompts:
            if delta.index != 0:
                self._waiting.setdefault(request, []).append((choice, delta))
                return []
            self._prompts[request] = delta.prompt_logprobs
        chunks = self._chunks(choice, delta)
        for late in self._waiting.pop(request, ()):
            chunks += self._chunks(*late)
        return chunks

    def _chunks(self, choice: int, delta: TokenDelta) -> list[Payload]:
        chunks = []
        if choice not in self._offsets:
            self._offsets[choice] = _offsets(self._prepared)
            if self._prepared.echoes:
                request = choice // self._prepared.n
                repeated = self._prepared.echoes[request]
                rows = _prompt_rows(repeated, self._prompts.get(request, ()))
                chunks.append(self._text(choice, repeated.text, rows))
        if delta.text or delta.logprobs:
            chunks.append(self._text(choice, delta.text, ((entry.token_id, entry) for entry in delta.logprobs)))
        if delta.finish_reason is not None:
            chunks.append(self._text(choice, "", None, FINISH[delta.finish_reason]))
        return chunks

    def _text(self, choice: int, text: str, rows: Iterable[_Row] | None, finish: str | None = None) -> Payload:
        logprobs = None if rows is None else _logprobs(self._prepared, rows, self._offsets[choice])
        return self._chunk({"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish})


def _choice(prepared: PreparedRequest, index: int, choices: Sequence[Sequence[TokenDelta]]) -> Payload:
    deltas = choices[index]
    request = index // prepared.n
    scored = prompt_logprobs_of(choices[request * prepared.n])  # the first choice's deltas carry them for all
    rows: list[_Row] = [(entry.token_id, entry) for entry in logprobs_of(deltas)]
    text = text_of(deltas)
    if prepared.echoes:
        rows = [*_prompt_rows(prepared.echoes[request], scored), *rows]
        text = prepared.echoes[request].text + text
    reason = deltas[-1].finish_reason
    entry: Payload = {
        "index": index,
        "text": text,
        "logprobs": _logprobs(prepared, rows, _offsets(prepared)),
        "finish_reason": reason and FINISH[reason],
    }
    if prepared.prompt_logprobs is not None:
        entry["prompt_logprobs"] = prompt_logprobs_by_id(prepared.model.text, scored, prepared.prompt_logprobs)
    return entry


def _offsets(prepared: PreparedRequest) -> Offsets:
    return Offsets(prepared.model.text, prepared.requests[0].sampling.skip_special_tokens)


def _prompt_rows(repeated: Echo, scored: Sequence[TokenLogprob | None]) -> Iterable[_Row]:
    return zip_longest(repeated.ids, scored[: len(repeated.ids)])


def _logprobs(prepared: PreparedRequest, rows: Iterable[_Row], offsets: Offsets) -> Payload | None:
    if prepared.logprobs is None:
        return None
    text = prepared.model.text
    tokens, token_logprobs, top_logprobs, text_offset = [], [], [], []
    for token_id, entry in rows:
        token = token_string(token_bytes(text, token_id))
        tokens.append(token)
        token_logprobs.append(None if entry is None else entry.logprob)
        text_offset.append(offsets.next(token_id))
        top_logprobs.append(None if entry is None else _top(prepared, token, entry))
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": text_offset,
    }


def _top(prepared: PreparedRequest, token: str, entry: TokenLogprob) -> dict[str, float]:
    """The best tokens and the chosen one. Of two tokens with one spelling the likelier stays."""
    top: dict[str, float] = {}
    for token_id, logprob in entry.top[: prepared.logprobs]:
        top.setdefault(token_string(token_bytes(prepared.model.text, token_id)), logprob)
    top.setdefault(token, entry.logprob)
    return top

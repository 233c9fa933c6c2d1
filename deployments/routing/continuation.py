"""Keeps what a client has of an answer, and makes the requests that ask another replica for the rest of it.

An engine draws each token from the request's seed and the token's position alone, so that a replica that is given the
prompt and the tokens so far goes on exactly as the lost one would have. The other replica makes the text anew from all
tokens, and the part that the client has is cut off its front. So characters and stop strings that the lost replica held
back come out right.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from engine.runner.random import choice_seed
from engine.types import UNFINISHED, GenerateRequest, Timings, TokenDelta


@dataclass(slots=True)
class _Choice:
    """What the client has of one choice, and what is still to be cut off what comes."""

    tokens: list[int] = field(default_factory=list)
    num_chars: int = 0
    num_logprobs: int = 0
    num_cached: int | None = None
    begun: Timings | None = None
    ended: bool = False
    cut_tokens: int = 0
    cut_chars: int = 0


class Continuation:
    """The choices of one HTTP request, across several attempts. Every delta must pass through take()."""

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        # Without a seed of the client's, one is chosen here: another replica must draw what this one would have.
        self._requests = [_seeded(request) for request in requests]
        self._choices = {r.request_id: [_Choice() for _ in range(r.sampling.n)] for r in requests}
        self._asked: dict[tuple[str, int], tuple[str, int]] = {}  # (id, index) as asked -> as the client knows it
        self._attempt = 0

    @property
    def started(self) -> bool:
        """Whether the client may have received a part of the answer."""
        return any(c.tokens or c.num_chars or c.ended for c in self._all())

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.ended for choice in self._all())

    def rest(self, elapsed_s: float) -> tuple[GenerateRequest, ...]:
        """The requests for the next attempt.

        `elapsed_s`, the seconds since the client's request came, are taken off its deadline. Request ids differ from
        attempt to attempt, as a replica may still be busy with an earlier one.
        """
        number, self._attempt = self._attempt, self._attempt + 1
        asked = [part for request in self._requests for part in self._unfinished(_hurried(request, elapsed_s), number)]
        return tuple(asked)

    def take(self, deltas: Iterable[TokenDelta]) -> tuple[list[TokenDelta], TokenDelta | None]:
        """Takes the deltas of the current attempt. Returns those for the client, under its ids and without what it has.

        If the replica has given up a choice, the delta that says so is returned apart and is not for the client.
        """
        fresh: list[TokenDelta] = []
        fault: TokenDelta | None = None
        for delta in deltas:
            if delta.finish_reason in UNFINISHED:
                fault = delta
                continue
            request_id, index = self._asked[delta.request_id, delta.index]
            fresh.append(self._new(delta, self._choices[request_id][index], request_id, index))
        return fresh, fault

    def _new(self, delta: TokenDelta, choice: _Choice, request_id: str, index: int) -> TokenDelta:
        tokens, text = delta.token_ids[choice.cut_tokens :], delta.text[choice.cut_chars :]
        choice.cut_tokens -= min(choice.cut_tokens, len(delta.token_ids))
        choice.cut_chars -= min(choice.cut_chars, len(delta.text))
        choice.tokens += tokens
        choice.num_chars += len(text)
        choice.num_logprobs += len(delta.logprobs)
        choice.ended = delta.finish_reason is not None
        if choice.num_cached is None:
            choice.num_cached, choice.begun = delta.num_cached_tokens, delta.timings
        timings = delta.timings
        if timings is not None and choice.begun is not None:
            timings = replace(timings, queue_s=choice.begun.queue_s, prefill_s=choice.begun.prefill_s)
        return replace(
            delta,
            request_id=request_id,
            index=index,
            token_ids=tokens,
            text=text,
            num_cached_tokens=choice.num_cached,
            num_completion_tokens=max(delta.num_completion_tokens, len(choice.tokens)),
            timings=timings,
        )

    def _unfinished(self, request: GenerateRequest, attempt: int) -> list[GenerateRequest]:
        name, choices = request.request_id, self._choices[request.request_id]
        if not any(c.tokens or c.ended for c in choices):  # from the start, all choices together
            asked = replace(request, request_id=f"{name}.{attempt}") if attempt else request
            self._asked |= {(asked.request_id, index): (name, index) for index in range(len(choices))}
            return [asked]
        parts = []
        for index, choice in enumerate(choices):
            if not choice.ended:
                part = _resumed(request, index, choice, f"{name}.{attempt}.{index}")
                self._asked[part.request_id, 0] = (name, index)
                parts.append(part)
        return parts

    def _all(self) -> Iterable[_Choice]:
        return (choice for choices in self._choices.values() for choice in choices)


def _resumed(request: GenerateRequest, index: int, choice: _Choice, request_id: str) -> GenerateRequest:
    params = request.sampling
    assert params.seed is not None
    # Logprobs that were held back with their text are lost: those tokens are generated again.
    keep = len(choice.tokens) if params.logprobs is None else min(choice.num_logprobs, len(choice.tokens))
    choice.cut_tokens, choice.cut_chars = len(choice.tokens) - keep, choice.num_chars
    prompt_logprobs = params.prompt_logprobs if index == 0 and not choice.tokens else None
    sampling = replace(params, n=1, seed=choice_seed(params.seed, index), prompt_logprobs=prompt_logprobs)
    return replace(
        request,
        request_id=request_id,
        prompt=(*request.prompt, *choice.tokens[:keep]),
        resumed_tokens=keep,
        sampling=sampling,
        deadline_s=None if choice.tokens else request.deadline_s,  # it is about the first token
    )


def _seeded(request: GenerateRequest) -> GenerateRequest:
    if request.sampling.seed is not None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))


def _hurried(request: GenerateRequest, elapsed_s: float) -> GenerateRequest:
    if request.deadline_s is None or not elapsed_s:
        return request
    return replace(request, deadline_s=max(0.0, request.deadline_s - elapsed_s))

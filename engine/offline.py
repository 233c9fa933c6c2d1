"""What Engine.generate() returns: whole completions, put together from deltas."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import EngineError
from engine.types import FinishReason, TokenDelta, TokenLogprob


@dataclass(frozen=True, slots=True)
class CompletionChoice:
    """One choice: all of its tokens, their text, and their log probabilities if they were asked for."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's outcome. `error` set: the prompt was refused and `choices` is empty."""

    choices: tuple[CompletionChoice, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: EngineError | None = None


def completion(deltas: list[TokenDelta]) -> Completion:
    """The outcome of one request from all its deltas, in the order in which they came."""
    by_index: dict[int, list[TokenDelta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    choices = tuple(
        CompletionChoice(
            token_ids=tuple(t for d in own for t in d.token_ids),
            text="".join(d.text for d in own),
            logprobs=tuple(entry for d in own for entry in d.logprobs),
            finish_reason=own[-1].finish_reason or FinishReason.ERROR,
        )
        for _, own in sorted(by_index.items())
    )
    first = by_index[0][0]
    return Completion(choices, first.prompt_logprobs, first.num_prompt_tokens, first.num_cached_tokens)

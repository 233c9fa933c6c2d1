"""Whole completions for scripts and batch jobs: run prompts to their end, results in input order."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.types import FinishReason, GenerateRequest, SamplingParams, TokenDelta, TokenLogprob

if TYPE_CHECKING:
    from engine.engine import Engine


@dataclass(frozen=True, slots=True)
class CompletionChoice:
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


def generate(engine: Engine, prompts: Seq[str | Iterable[int]], params: Seq[SamplingParams]) -> list[Completion]:
    """A refused prompt becomes a Completion with `error`, in its place, and disturbs nobody."""
    outcomes: dict[str, Completion | list[TokenDelta]] = {}
    for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        ids = engine.text.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request_id = f"offline-{i}"
        try:
            engine.add(GenerateRequest(request_id, tuple(ids), sampling))
            outcomes[request_id] = []
        except EngineError as error:
            outcomes[request_id] = Completion(error=error)
    while engine.has_work:
        for delta in engine.step():
            into = outcomes[delta.request_id]
            assert isinstance(into, list)
            into.append(delta)
    return [o if isinstance(o, Completion) else _join(o) for o in outcomes.values()]


def _join(deltas: list[TokenDelta]) -> Completion:
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

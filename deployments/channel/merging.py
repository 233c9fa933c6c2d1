"""Joins several deltas of one choice to one, for a message that carries the tokens of several steps."""

from __future__ import annotations

from collections.abc import Sequence

from engine.types import UNFINISHED, TokenDelta


def merged(deltas: Sequence[TokenDelta]) -> list[TokenDelta]:
    """Joins the deltas of each choice, in order, to one.

    A delta of a choice that did not come to its end stays apart from the text before it, so that the text can still be
    used.
    """
    choices: dict[tuple[str, int, bool], list[TokenDelta]] = {}
    for delta in deltas:
        unfinished = delta.finish_reason in UNFINISHED
        choices.setdefault((delta.request_id, delta.index, unfinished), []).append(delta)
    return [_joined(parts) if len(parts) > 1 else parts[0] for parts in choices.values()]


def _joined(parts: Sequence[TokenDelta]) -> TokenDelta:
    first, last = parts[0], parts[-1]
    return TokenDelta(
        request_id=last.request_id,
        index=last.index,
        token_ids=tuple([t for part in parts for t in part.token_ids]),
        text="".join([part.text for part in parts]),
        logprobs=tuple([entry for part in parts for entry in part.logprobs]),
        prompt_logprobs=first.prompt_logprobs,
        finish_reason=last.finish_reason,
        error=last.error,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        num_completion_tokens=last.num_completion_tokens,
        timings=last.timings or first.timings,
    )

"""Where a sequence ends, in tokens. Stop strings are text and belong to the engine's output side."""

from __future__ import annotations

from engine.types import FinishReason, Sequence


def set_limits(seq: Sequence, eos_ids: frozenset[int], max_model_len: int) -> None:
    """Once, before the first step: what the others here go by."""
    sampling = seq.request.sampling
    seq.max_len = min(seq.num_prompt + sampling.max_tokens, max_model_len)
    seq.stop_ids = sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | eos_ids


def stop_reason(seq: Sequence) -> FinishReason | None:
    """Whether the newest output token is the last. An EOS or stop token stays in seq.tokens and counts as output."""
    # The sampler masks stop tokens before min_tokens; one that comes all the same is not obeyed.
    if seq.tokens[-1] in seq.stop_ids and seq.num_output > seq.request.sampling.min_tokens:
        return FinishReason.STOP
    if len(seq.tokens) >= seq.max_len:
        return FinishReason.LENGTH
    return None


def useful_drafts(seq: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """No more drafts than tokens may follow; one more token always comes with them."""
    return drafts[: seq.max_len - len(seq.tokens) - 1]


def max_kv_tokens(seq: Sequence) -> int:
    """The most K/V a sequence can come to need. The last token is never fed back, so it needs none."""
    return max(seq.num_prompt, seq.max_len - 1)

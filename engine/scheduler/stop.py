"""Where a sequence ends, in tokens. (Stop strings are text and belong to the engine's output side.)"""

from __future__ import annotations

from engine.types import FinishReason, Sequence


def stop_reason(seq: Sequence, eos_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
    """Whether the newest output token is the last. An EOS or stop token stays in seq.tokens and counts as output."""
    sampling, token, num_output = seq.request.sampling, seq.tokens[-1], seq.num_output
    stops = token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos)
    # The sampler masks stop tokens before min_tokens; one that comes all the same is not obeyed.
    if stops and num_output > sampling.min_tokens:
        return FinishReason.STOP
    if num_output >= sampling.max_tokens or len(seq.tokens) >= max_model_len:
        return FinishReason.LENGTH
    return None


def useful_drafts(seq: Sequence, drafts: tuple[int, ...], max_model_len: int) -> tuple[int, ...]:
    """No more drafts than tokens may follow; one more token always comes with them."""
    if not drafts:
        return ()
    left = min(seq.request.sampling.max_tokens - seq.num_output, max_model_len - len(seq.tokens))
    return drafts[: left - 1]


def max_kv_tokens(seq: Sequence, max_model_len: int) -> int:
    """The most K/V a new sequence can come to need. The last token is never fed back, so it needs none."""
    end = min(seq.num_prompt + seq.request.sampling.max_tokens, max_model_len)
    return max(seq.num_prompt, end - 1)

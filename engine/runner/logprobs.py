"""Log-probabilities of given tokens, with the best alternatives, from raw logits."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.runner.rows import row_argmax, row_chunks, top_ranked
from engine.types import TokenLogprob

FLOOR = -9999.0  # stands for minus infinity, which JSON has no word for
_MARGIN = 12  # ranks beyond k, so that a tie at the cut seldom needs a full sort


def token_logprobs(logits: Tensor, targets: Seq[int], ks: Seq[int]) -> list[TokenLogprob]:
    """Natural-log probability of targets[i] under row i of logits [R, vocab] (fp32, left as they are).

    `top` holds the ks[i] best (fewer if the vocabulary is smaller), most likely first, ties by lower id, and
    then the target itself where it is not among them, so that k > 0 always lists the target. k = 0 lists
    nothing. Raises EngineError for a row with NaN.
    """
    found: list[TokenLogprob] = []
    for part in row_chunks(len(targets), logits.shape[1], logits.device):
        found += _part(logits[part], targets[part], ks[part])
    return found


def _part(x: Tensor, targets: Seq[int], ks: Seq[int]) -> list[TokenLogprob]:
    norm = _log_sum_exp(x)
    chosen = _logprob(x.gather(1, torch.tensor(targets, device=x.device)[:, None]), norm)[:, 0].tolist()
    if not any(ks):
        return [TokenLogprob(t, lp) for t, lp in zip(targets, chosen, strict=True)]
    values, ids = _best(x, min(max(ks), x.shape[1]))
    best = zip(ids.tolist(), _logprob(values, norm).tolist(), strict=True)
    return [
        TokenLogprob(t, lp, _alternatives(t, lp, k, row_ids, row_lps))
        for t, lp, k, (row_ids, row_lps) in zip(targets, chosen, ks, best, strict=True)
    ]


def _alternatives(
    target: int, logprob: float, k: int, ids: list[int], logprobs: list[float]
) -> tuple[tuple[int, float], ...]:
    top = tuple(zip(ids[:k], logprobs[:k], strict=True))
    return top if k == 0 or target in ids[:k] else (*top, (target, logprob))


def _log_sum_exp(x: Tensor) -> Tensor:
    """[R, 1] float32."""
    peak, _ = row_argmax(x)
    if not torch.isfinite(peak).all():
        raise EngineError("the model's logits contain NaN or infinity: log-probabilities do not exist")
    # The best token's probability is one part in the sum of exp(x - peak).
    return (peak - x.softmax(-1).amax(-1).log())[:, None]


def _logprob(values: Tensor, norm: Tensor) -> Tensor:
    return (values - norm).clamp_(min=FLOOR)


def _best(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values [R, k], ids [R, k]), exact also among ties."""
    values, ids, certain = top_ranked(x, min(k + _MARGIN, x.shape[1]))
    values, ids = values[:, :k], ids[:, :k]
    unsure = (certain < k).nonzero()[:, 0]
    if len(unsure):
        exact_values, exact_ids, _ = top_ranked(x[unsure], x.shape[1])
        values[unsure], ids[unsure] = exact_values[:, :k], exact_ids[:, :k]
    return values, ids

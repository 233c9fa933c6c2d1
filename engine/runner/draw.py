"""One categorical draw per row: the filters, then the inverse of the cumulative distribution at u.

A row is cut to the tokens its top_k, top_p and min_p leave, in that order; each filter keeps a prefix of the
tokens ranked by (probability descending, id ascending). Rows without filters are never ranked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.runner.rows import BLOCK, block_sums, probabilities, row_chunks, take_rows, top_ranked

# Ranking a whole vocabulary costs far more than ranking its top, and the top is nearly always enough: try
# windows of these widths before the whole.
WINDOWS = (32, 64, 512, 4096)
_MARGIN = 8  # ranks beyond top_k, so that a tie at the cut seldom fills the rest of the window
_FIRST_WINDOW = 64
_NOISE = 2e-6  # relative error of a float32 softmax: a prefix so close to top_p is complete


@dataclass(frozen=True, slots=True)
class DrawRows:
    """Filters of R rows, all [R]. top_k 0 and top_p 1 are off; temperature is above 0; u lies in [0, 1)."""

    temperature: Tensor  # float32
    top_k: Tensor  # int64
    top_p: Tensor  # float64
    min_p: Tensor  # float32
    u: Tensor  # float64

    def take(self, rows: Tensor | slice) -> DrawRows:
        """The settings of some rows."""
        return DrawRows(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.u[rows])


def draw_unranked(logits: Tensor, peak: Tensor, rows: DrawRows) -> Tensor:
    """Ids [R] after temperature alone, cumulated in order of token id. peak [R] is the row's largest logit."""
    picked = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for part in row_chunks(len(logits), logits.shape[1], logits.device):
        weights = probabilities(logits[part], peak[part], rows.temperature[part])
        picked[part] = _invert_by_blocks(weights, rows.u[part])
    return picked


def draw_ranked(logits: Tensor, peak: Tensor, rows: DrawRows) -> Tensor:
    """Ids [R], cumulated in order of rank, after top_k, top_p and min_p. peak [R] is the row's largest logit."""
    vocab = logits.shape[1]
    picked = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    totals = _totals(logits, peak, rows)
    need = torch.where(rows.top_k > 0, rows.top_k + _MARGIN, _FIRST_WINDOW).clamp(max=vocab)
    pending = torch.arange(len(logits), device=logits.device)
    for width in (*(w for w in WINDOWS if w < vocab), vocab):
        fits = need[pending] <= width
        trying, left = pending[fits], [pending[~fits]]
        for part in row_chunks(len(trying), width, logits.device):
            now = trying[part]
            ids, done = _draw_within(take_rows(logits, now), peak[now], totals[now], rows.take(now), width)
            picked[now[done]] = ids[done]
            left.append(now[~done])
        pending = torch.cat(left).sort().values
        if not len(pending):
            break
    return picked


def _totals(logits: Tensor, peak: Tensor, rows: DrawRows) -> Tensor:
    """[R] float64: the sum of exp((x - peak) / temperature) over the vocabulary where top_p is a share of it;
    elsewhere 0."""
    totals = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    wanted = ((rows.top_k == 0) & (rows.top_p < 1.0)).nonzero()[:, 0]
    for part in row_chunks(len(wanted), logits.shape[1], logits.device):
        r = wanted[part]
        # The best token's weight is 1, so that its probability is one part in the sum.
        totals[r] = 1.0 / probabilities(take_rows(logits, r), peak[r], rows.temperature[r]).amax(-1).double()
    return totals


def _draw_within(x: Tensor, peak: Tensor, totals: Tensor, rows: DrawRows, width: int) -> tuple[Tensor, Tensor]:
    """(ids [R], done [R]): rows not done need a wider window. top_k is smaller than width, or width is vocab."""
    values, ids, certain = top_ranked(x, width)
    weights = ((values - peak[:, None]).double() / rows.temperature[:, None]).exp()
    cumulative = weights.cumsum(-1)
    limited = rows.top_k > 0
    cut = torch.where(limited, rows.top_k, x.shape[1])
    mass = torch.where(limited, cumulative.gather(1, (cut - 1).clamp(max=width - 1)[:, None])[:, 0], totals)
    nucleus = (cumulative < ((rows.top_p - _NOISE) * mass)[:, None]).sum(-1) + 1
    cut = torch.where(rows.top_p < 1.0, torch.minimum(cut, nucleus), cut)
    cut = torch.minimum(cut, (weights >= rows.min_p[:, None]).sum(-1))
    # Past a weight of 0 nothing can be drawn, so that it does not matter which tokens are there.
    done = (cut <= certain) | (weights[:, -1] == 0.0) | (width == x.shape[1])
    last = (cut - 1).clamp(0, width - 1)[:, None]
    rank = _invert(cumulative, rows.u, cumulative.gather(1, last)[:, 0])
    return ids.gather(1, rank[:, None])[:, 0], done


def _invert(cumulative: Tensor, u: Tensor, total: Tensor) -> Tensor:
    """First index whose cumulative weight exceeds u * total, never one that adds no weight below total."""
    index = torch.searchsorted(cumulative, (u * total)[:, None], right=True)
    # u * total may round up to total: the first index that reaches total is then the last possible one.
    return torch.minimum(index, torch.searchsorted(cumulative, total[:, None].contiguous()))[:, 0]


def _invert_by_blocks(weights: Tensor, u: Tensor) -> Tensor:
    """Like _invert over weights' running sum, but only one block of each row is summed token by token."""
    vocab = weights.shape[1]
    cumulative = block_sums(weights).cumsum(-1)
    total = cumulative[:, -1]
    block = _invert(cumulative, u, total)[:, None]
    end = cumulative.gather(1, block)[:, 0]
    start = torch.where(block[:, 0] > 0, cumulative.gather(1, (block - 1).clamp(min=0))[:, 0], 0.0)
    places = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, places.clamp(max=vocab - 1)).masked_fill_(places >= vocab, 0.0)
    inside = inside.double().cumsum(-1)
    # As a share of the block: its float32 sum and the float64 sum of its tokens differ in the last bits.
    share = ((u * total - start) / (end - start)).clamp(0.0, 1.0)
    return block[:, 0] * BLOCK + _invert(inside, share, inside[:, -1])

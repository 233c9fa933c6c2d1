"""Attention in torch whose every product has the same shape, whatever runs beside it: for deterministic engines."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from engine.attention.torch_cache import TorchAttention, load, store
from engine.batch import ForwardBatch
from engine.kernels.reference import capped
from engine.kv.storage import LayerKV
from engine.select import Needs

_ROWS = 8
_SPAN = 256
"""Positions are cut into tiles of _ROWS queries and keys into spans of _SPAN, where each begins at a multiple. What a
row takes part in so depends on its own position alone, not on the chunk that it comes in."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """_ROWS positions of a sequence, of which some are in this step."""

    rows: Tensor  # [n] rows of the batch
    at: Tensor  # [n] their places in the tile
    slots: tuple[Tensor, ...]  # per span, [_SPAN]
    hidden: Tensor  # [_ROWS, spans * _SPAN]


class TorchFixed(TorchAttention):
    """One tile after the other, in float32. A key that no row sees is another one of the sequence, masked: no other
    memory is read."""

    needs: ClassVar[Needs] = Needs(invariant=True)

    def plan(self, batch: ForwardBatch) -> list[_Tile]:
        """See AttentionBackend.plan(). One tile for each _ROWS positions of a sequence."""
        tiles = []
        sequences = zip(pairwise(batch.query_starts.tolist()), batch.seq_lens.tolist(), batch.block_table, strict=True)
        for (row, stop), end, table in sequences:
            start = end - (stop - row)
            for first in range(start - start % _ROWS, end, _ROWS):
                low, high = max(first, start), min(first + _ROWS, end)
                tiles.append(self._tile(table, first, (low, high), row + low - start))
        return tiles

    def _tile(self, table: Tensor, first: int, own: tuple[int, int], row: int) -> _Tile:
        """The tile of positions from `first` on; those in the range `own` are rows of the batch from `row` on."""
        device, window, sinks = table.device, self.shape.window, self.shape.sinks
        keys = torch.arange(_oldest(first, window), -(-(first + _ROWS) // _SPAN) * _SPAN, device=device)
        queries = torch.arange(first, first + _ROWS, device=device)[:, None]
        hidden = keys > queries
        if window is not None:
            early = torch.arange(-(-sinks // _SPAN) * _SPAN, device=device)
            hidden = torch.cat(((early >= sinks) | (early > queries), hidden | (keys <= queries - window)), 1)
            hidden[:, len(early) :] |= keys < sinks
            keys = torch.cat((early, keys))
        here = torch.arange(own[0] - first, own[1] - first, device=device)
        inside = torch.where(hidden[here].all(0), own[1] - 1, keys)
        slots = table.long()[inside // self.block_size] * self.block_size + inside % self.block_size
        rows = torch.arange(row, row + len(here), device=device)
        return _Tile(rows, here, slots.view(-1, _SPAN).unbind(), hidden)

    def run(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, batch: ForwardBatch, meta: Seq[_Tile]) -> Tensor:
        """See AttentionBackend.run()."""
        store(k, v, kv, batch.slots)
        out = q.new_empty(q.shape[0], self.shape.num_heads * self.shape.head_dim)
        for tile in meta:
            out[tile.rows] = self._attend(q[tile.rows], kv, tile).to(q.dtype)
        return out

    def _attend(self, q: Tensor, kv: LayerKV, tile: _Tile) -> Tensor:
        heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        whole = torch.zeros(_ROWS, *q.shape[1:], device=q.device)
        whole[tile.at] = q.float()
        stacked = whole.view(_ROWS, heads, -1, dim).permute(1, 0, 2, 3).reshape(heads, -1, dim)
        spans = [[x.float().transpose(0, 1).contiguous() for x in load(kv, slots)] for slots in tile.slots]
        scores = torch.cat([self._scores(stacked, keys) for keys, _ in spans], -1)
        hidden = tile.hidden.repeat_interleave(stacked.shape[1] // _ROWS, 0)
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1).view(*stacked.shape[:2], -1, _SPAN).unbind(-2)
        sums = torch.zeros_like(stacked)
        for part, (_, values) in zip(weights, spans, strict=True):
            sums += torch.bmm(part.contiguous(), values)
        return sums.view(heads, _ROWS, -1, dim).permute(1, 0, 2, 3).reshape(_ROWS, -1)[tile.at]

    def _scores(self, q: Tensor, keys: Tensor) -> Tensor:
        scores = torch.bmm(q, keys.transpose(1, 2)).mul_(self.shape.scale)
        return scores if self.shape.softcap is None else capped(scores, self.shape.softcap)


def _oldest(position: int, window: int | None) -> int:
    """The beginning of the span in which the first key lies that position sees."""
    first = 0 if window is None else max(0, position - window + 1)
    return first - first % _SPAN

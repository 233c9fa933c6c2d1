"""The reference backend: gather each sequence's context, then torch's own attention. CPU and CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import AttentionShape
from engine.attention.torch_cache import TorchAttention, as_floats, store
from engine.batch import ForwardBatch
from engine.kernels.base import Kernels
from engine.kernels.reference import capped
from engine.kv.storage import LayerKV
from engine.select import Needs

GROUP_SCORES = 1 << 20
"""Sequences share a group while its padded contexts and its scores per head stay below this number, 4 MiB in
float32."""


@dataclass(slots=True)
class _Group:
    """n sequences with q rows each, attended in one call; contexts are padded to the longest, L."""

    rows: Tensor | None  # [n * q] rows of the batch; None: the whole batch in order
    slots: Tensor  # [n * L] cache slot of each context position
    mask: Tensor | None  # [n, 1, heads_per_kv * q or 1, L]; None: every row sees all of L
    num_seqs: int
    context: list[Tensor] = field(default_factory=list)  # scratch for gathered K and V, reused by every layer


class TorchPaged(TorchAttention):
    """Sequences with equally many rows (all decodes, or one chunk) are gathered and attended together.

    A padded position repeats a slot of the same sequence, so no row ever reads another sequence's
    memory, not even behind the mask.
    """

    needs: ClassVar[Needs] = Needs()

    def __init__(
        self,
        shape: AttentionShape,
        block_size: int,
        kernels: Kernels | None = None,
        group_scores: int = GROUP_SCORES,
    ) -> None:
        super().__init__(shape, block_size, kernels)
        self._group_scores = group_scores

    def plan(self, batch: ForwardBatch) -> list[_Group]:
        """See AttentionBackend.plan(). One group for each call of torch's attention."""
        starts = batch.query_starts.tolist()
        counts = [end - start for start, end in pairwise(starts)]
        groups = gather_alike(counts, batch.seq_lens.tolist(), self._group_scores)
        return [self._group(batch, seqs, counts[seqs[0]]) for seqs in groups]

    def _group(self, batch: ForwardBatch, seqs: list[int], q: int) -> _Group:
        device = batch.block_table.device
        whole = len(seqs) * q == batch.input_ids.shape[0]
        ids = torch.arange(len(seqs), device=device) if whole else torch.tensor(seqs, device=device)
        ends = batch.seq_lens.long()[ids]  # [n]
        window, sinks = self.shape.window, self.shape.sinks if self.shape.window is not None else 0
        first = torch.zeros_like(ends)
        if window is not None:
            first = (ends - q - window + 1).clamp(min=sinks)
        length = max(0, int((ends - first).max()))
        keys = first[:, None] + torch.arange(length, device=device)  # [n, L] absolute positions
        keys = torch.cat((torch.arange(sinks, device=device).expand(len(seqs), sinks), keys), 1)
        inside = keys.clamp(max=(ends - 1)[:, None])
        table = batch.block_table.long()[ids]
        slots = table.gather(1, inside // self.block_size) * self.block_size + inside % self.block_size
        queries = (ends - q)[:, None] + torch.arange(q, device=device)  # [n, q]
        mask = keys[:, None, :] <= queries[:, :, None]  # [n, q, L]
        if window is not None:
            mask &= (keys[:, None, :] > queries[:, :, None] - window) | (keys[:, None, :] < sinks)
        rows = None
        if not whole:
            rows = (batch.query_starts.long()[ids][:, None] + torch.arange(q, device=device)).flatten()
        return _Group(
            rows=rows,
            slots=slots.flatten(),
            mask=None if bool(mask.all()) else self._per_head(mask),
            num_seqs=len(seqs),
        )

    def _per_head(self, mask: Tensor) -> Tensor:
        """A group's query heads are stacked along the row axis of their K/V head."""
        repeats = self.shape.num_heads // self.shape.num_kv_heads if mask.shape[1] > 1 else 1
        return mask.repeat(1, repeats, 1).unsqueeze(1)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: LayerKV,
        batch: ForwardBatch,
        meta: list[_Group],
    ) -> Tensor:
        """See AttentionBackend.run()."""
        store(k, v, kv, batch.slots)
        caches = [cache.view(-1, *cache.shape[2:]) for cache in kv]
        out = q.new_empty(q.shape[0], self.shape.num_heads * self.shape.head_dim)
        for group in meta:
            if group.rows is None:
                return self._attend(q, caches, group)
            out.index_copy_(0, group.rows, self._attend(q.index_select(0, group.rows), caches, group))
        return out

    def _attend(self, q: Tensor, caches: list[Tensor], group: _Group) -> Tensor:
        """`q` [n * rows, heads, dim] -> [n * rows, heads * dim]."""
        n, hkv, dim = group.num_seqs, self.shape.num_kv_heads, self.shape.head_dim
        total = q.shape[0]
        if not group.context:
            group.context = [c.new_empty(group.slots.shape[0], *c.shape[1:]) for c in caches]
        gathered = [
            torch.index_select(cache, 0, group.slots, out=out) for cache, out in zip(caches, group.context, strict=True)
        ]
        keys, values = (x.to(q.dtype).view(n, -1, hkv, dim).transpose(1, 2) for x in as_floats(gathered))
        stacked = q.view(n, total // n, hkv, -1, dim).permute(0, 2, 3, 1, 4).reshape(n, hkv, -1, dim)
        out = self._attention(stacked, keys, values, group.mask)
        return out.view(n, hkv, -1, total // n, dim).permute(0, 3, 1, 2, 4).reshape(total, -1)

    def _attention(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """`q` [n, kv_heads, rows, dim], keys and values [n, kv_heads, L, dim]."""
        cap, scale = self.shape.softcap, self.shape.scale
        if cap is None:
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
        hidden = None if mask is None else ~mask.expand(-1, -1, q.shape[2], -1)
        size = max(1, self._group_scores // keys.shape[2])  # rows at a time: these scores are all in memory
        out = []
        for at in range(0, q.shape[2], size):
            scores = capped((q[:, :, at : at + size] @ keys.transpose(2, 3)).float() * scale, cap)
            if hidden is not None:
                scores.masked_fill_(hidden[:, :, at : at + size], -torch.inf)
            out.append(scores.softmax(-1).to(q.dtype) @ values)
        return torch.cat(out, 2)


def gather_alike(counts: list[int], lens: list[int], most_scores: int = GROUP_SCORES) -> Iterator[list[int]]:
    """Sequence indices in groups of equal row count and similar context length.

    `counts` and `lens`: rows and tokens of context of each sequence. A group of several sequences has at most
    `most_scores` scores per head, padding included.
    """
    if len(set(counts)) == 1 and len(counts) * counts[0] * max(lens) <= most_scores:
        yield list(range(len(counts)))
        return
    group: list[int] = []
    for i in sorted(range(len(counts)), key=lambda i: (counts[i], lens[i])):
        if group and (counts[i] != counts[group[0]] or (len(group) + 1) * counts[i] * lens[i] > most_scores):
            yield group
            group = []
        group.append(i)
    if group:
        yield group

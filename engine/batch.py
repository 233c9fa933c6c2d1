"""A step's tokens as tensors: what layers, attention and models compute from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.types import SeqSlice


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of B sequences, packed without padding. Sequence b's rows are
    query_starts[b] .. query_starts[b+1]; they are the last rows of its seq_lens[b] tokens of context."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: block * block_size + offset, where each token's K/V goes
    query_starts: Tensor  # [B + 1] int32
    seq_lens: Tensor  # [B] int32, context length including this step's tokens
    block_table: Tensor  # [B, max_blocks] int32, rows padded with 0


def build_batch(slices: Seq[SeqSlice], block_size: int, device: torch.device) -> ForwardBatch:
    """Pack slices in order, on `device`. One numpy pass, one copy per tensor."""
    counts = np.fromiter((len(s.token_ids) for s in slices), np.int64, len(slices))
    starts = np.fromiter((s.start for s in slices), np.int64, len(slices))
    query_starts = np.zeros(len(slices) + 1, np.int64)
    np.cumsum(counts, out=query_starts[1:])
    total = int(query_starts[-1])
    ids = np.fromiter((t for s in slices for t in s.token_ids), np.int64, total)
    row_seq = np.repeat(np.arange(len(slices)), counts)
    positions = np.arange(total) - query_starts[row_seq] + starts[row_seq]
    table = np.zeros((len(slices), max(len(s.block_ids) for s in slices)), np.int32)
    for i, s in enumerate(slices):
        table[i, : len(s.block_ids)] = s.block_ids
    slots = table[row_seq, positions // block_size].astype(np.int64) * block_size + positions % block_size
    seq_lens = starts + counts

    def put(a: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(a).to(device=device, dtype=dtype)

    return ForwardBatch(
        input_ids=put(ids, torch.int64),
        positions=put(positions, torch.int64),
        slots=put(slots, torch.int64),
        query_starts=put(query_starts, torch.int32),
        seq_lens=put(seq_lens, torch.int32),
        block_table=put(table, torch.int32),
    )

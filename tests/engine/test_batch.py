"""Packing slices into tensors."""

from __future__ import annotations

import torch

from engine.batch import build_batch
from engine.types import SeqSlice


def test_ragged_slices():
    batch = build_batch(
        [
            SeqSlice(0, (7, 8, 9), 3, (5, 2), sample=False),
            SeqSlice(1, (4,), 8, (9, 1, 3), sample=True),
        ],
        block_size=4,
        device=torch.device("cpu"),
    )
    assert batch.input_ids.tolist() == [7, 8, 9, 4]
    assert batch.positions.tolist() == [3, 4, 5, 8]
    assert batch.slots.tolist() == [5 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1, 3 * 4 + 0]
    assert batch.query_starts.tolist() == [0, 3, 4]
    assert batch.seq_lens.tolist() == [6, 9]
    assert batch.block_table.tolist() == [[5, 2, 0], [9, 1, 3]]
    assert batch.slots.dtype == batch.positions.dtype == torch.int64
    assert batch.block_table.dtype == batch.query_starts.dtype == torch.int32

"""What the contract suite cannot see: how sequences are grouped, and that groups give what one call would."""

from __future__ import annotations

import torch

from engine.attention.base import AttentionShape
from engine.attention.torch_paged import TorchPaged, gather_alike
from engine.batch import build_batch
from engine.types import SeqSlice

torch.set_num_threads(1)


def test_decodes_are_one_group():
    assert list(gather_alike([1] * 40, [100 + i for i in range(40)])) == [list(range(40))]


def test_groups_hold_equal_row_counts_and_bounded_padding():
    counts = [1, 16, 1, 1, 16, 1]
    lens = [900, 16, 10, 2000, 30, 12]
    groups = list(gather_alike(counts, lens, 1000))
    assert sorted(i for g in groups for i in g) == list(range(6))
    for g in groups:
        assert len({counts[i] for i in g}) == 1
        assert len(g) == 1 or len(g) * counts[g[0]] * max(lens[i] for i in g) <= 1000
    assert [2, 5] in groups


def test_grouping_changes_nothing():
    shape = AttentionShape(4, 2, 32, 32**-0.5)
    torch.manual_seed(0)
    lens = [5, 40, 17, 33]
    blocks = [tuple(range(4 * i, 4 * i + 3)) for i in range(4)]
    slices = [SeqSlice(i, (0,), n - 1, blocks[i], sample=True) for i, n in enumerate(lens)]
    batch = build_batch(slices, 16, torch.device("cpu"))
    q, k, v = torch.randn(4, 4, 32), torch.randn(4, 2, 32), torch.randn(4, 2, 32)
    kv = (torch.randn(16, 16, 2, 32), torch.randn(16, 16, 2, 32))
    backend = TorchPaged(shape, 16)
    together = backend.run(q, k, v, kv, batch, backend.plan(batch))
    apart = TorchPaged(shape, 16, group_scores=1)
    plan = apart.plan(batch)
    assert len(plan) == 4
    torch.testing.assert_close(apart.run(q, k, v, kv, batch, plan), together)


def test_a_window_gathers_only_what_it_sees():
    backend = TorchPaged(AttentionShape(4, 2, 32, 32**-0.5, window=8), 16)
    batch = build_batch([SeqSlice(0, (0, 0), 98, tuple(range(7)), sample=True)], 16, torch.device("cpu"))
    (group,) = backend.plan(batch)
    assert group.slots.tolist() == list(range(91, 100))

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine.kernels.cpu.ops import NativeKernels, PagedContext, Scoring

CONTEXTS = [1, 17, 64, 65, 130, 200]
QUERIES = [1, 17, 1, 40, 3, 150]


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    window: int | None = None
    kv_dtype: torch.dtype = torch.float32
    sinks: int = 0
    rounded: bool = False
    softcap: float | None = None


CASES = [
    Case(9, 3, 64, 16),
    Case(4, 4, 16, 8, window=10),
    Case(8, 1, 80, 16),
    Case(5, 1, 32, 7, window=64),
    Case(6, 3, 32, 16, window=40, sinks=21),
    Case(2, 1, 256, 32, window=70, kv_dtype=torch.bfloat16),
    Case(6, 2, 128, 1, kv_dtype=torch.float16),
    Case(50, 1, 16, 16),
    Case(4, 2, 48, 16, window=70, softcap=3.0),
]
ROUNDED = [
    Case(9, 3, 64, 16, kv_dtype=torch.bfloat16, rounded=True),
    Case(6, 3, 80, 16, window=37, kv_dtype=torch.bfloat16, sinks=21, rounded=True),
    Case(4, 4, 16, 7, window=11, kv_dtype=torch.bfloat16, rounded=True),
    Case(50, 1, 48, 32, kv_dtype=torch.bfloat16, rounded=True),
]


class Sequences:
    """Random sequences in a paged cache whose unused slots are NaN. Only what precedes each sequence's
    queries is in the cache; run() brings the rest."""

    def __init__(self, case: Case, contexts: list[int] = CONTEXTS, queries: list[int] = QUERIES) -> None:
        torch.manual_seed(0)  # two of the same case are equal
        self.case = c = case
        self.tokens = [
            (torch.randn(n, c.heads, c.dim) * 2, torch.randn(n, c.kv_heads, c.dim), torch.randn(n, c.kv_heads, c.dim))
            for n in contexts
        ]
        counts = [-(-n // c.block_size) for n in contexts]
        blocks = random.Random(0).sample(range(sum(counts) + 3), sum(counts))
        self.table = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
        for row, count in zip(self.table, counts, strict=True):
            row[:count] = torch.tensor([blocks.pop() for _ in range(count)])
        shape = (sum(counts) + 3, c.block_size, c.kv_heads, c.dim)
        self.kv = (torch.full(shape, torch.nan, dtype=c.kv_dtype), torch.full(shape, torch.nan, dtype=c.kv_dtype))
        for b, (n, count) in enumerate(zip(contexts, queries, strict=True)):
            slots = self.slots(b, 0, n - count)
            for cache, new in zip(self.kv, self.tokens[b][1:], strict=True):
                cache.view(-1, c.kv_heads, c.dim)[slots] = new[: n - count].to(c.kv_dtype)

    def slots(self, b: int, begin: int, end: int) -> Tensor:
        at = torch.arange(begin, end)
        return self.table[b, at // self.case.block_size].long() * self.case.block_size + at % self.case.block_size

    def run(self, kernels: NativeKernels, *slices: tuple[int, int, int]) -> Tensor:
        """Rows [begin, end) of sequences b, for each (b, begin, end); q, k and v are views of one buffer."""
        c = self.case
        rows = [torch.cat([t[begin:end].flatten(1) for t in self.tokens[b]], dim=1) for b, begin, end in slices]
        heads = torch.cat(rows).view(-1, c.heads + 2 * c.kv_heads, c.dim)
        q, k, v = heads.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        lengths = torch.tensor([0] + [end - begin for _, begin, end in slices])
        context = PagedContext(
            torch.cat([self.slots(*s) for s in slices]),
            lengths.cumsum(0).int(),
            torch.tensor([end for _, _, end in slices], dtype=torch.int32),
            self.table[[b for b, _, _ in slices]].contiguous(),
        )
        scoring = Scoring(c.dim**-0.5, c.window, c.sinks, c.rounded, c.softcap)
        return kernels.paged_attention(q, k, v, self.kv, context, scoring)

    def oracle(self, b: int) -> Tensor:
        """All rows of sequence b in float64."""
        c = self.case
        q, k, v = self.tokens[b]
        k, v = (t.to(c.kv_dtype).double().repeat_interleave(c.heads // c.kv_heads, dim=1) for t in (k, v))
        distance = torch.arange(len(q)).view(-1, 1) - torch.arange(len(q))
        seen = (distance >= 0) & ((distance < (c.window or len(q))) | (torch.arange(len(q)) < c.sinks))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * c.dim**-0.5
        if c.softcap is not None:
            scores = (scores / c.softcap).tanh() * c.softcap
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def last_rows() -> list[tuple[int, int, int]]:
    return [(b, n - queries, n) for b, (n, queries) in enumerate(zip(CONTEXTS, QUERIES, strict=True))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_close_to_float64(kernels, case):
    sequences = Sequences(case)
    got = sequences.run(kernels, *last_rows())
    want = torch.cat([sequences.oracle(b)[begin:end] for b, begin, end in last_rows()])
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ROUNDED, ids=str)
def test_rounded_is_close_as_far_as_bfloat16_goes(kernels, case):
    sequences = Sequences(case)
    got = sequences.run(kernels, *last_rows())
    want = torch.cat([sequences.oracle(b)[begin:end] for b, begin, end in last_rows()])
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("case", [*CASES[:4], *ROUNDED], ids=str)
def test_a_row_does_not_depend_on_batch_or_chunks(kernels, case, threads):
    torch.set_num_threads(threads)
    whole = Sequences(case).run(kernels, *last_rows())
    alone, chunked = Sequences(case), Sequences(case)
    rows = 0
    for b, begin, end in last_rows():
        expected = whole[rows : rows + end - begin]
        rows += end - begin
        one_by_one = [alone.run(kernels, (b, at, at + 1)) for at in range(begin, end)]
        assert torch.equal(torch.cat(one_by_one), expected)
        cuts = sorted({begin, min(end, begin + 5), min(end, begin + 70), end})
        pieces = [chunked.run(kernels, (b, i, j)) for i, j in pairwise(cuts)]
        assert torch.equal(torch.cat(pieces), expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_decodes_of_many_sequences(kernels, threads):
    """Each is written by the thread that attends it."""
    torch.set_num_threads(threads)
    contexts = [1 + 7 * i % 90 for i in range(30)]
    sequences = Sequences(Case(6, 3, 32, 16), contexts, [1] * len(contexts))
    got = sequences.run(kernels, *((b, n - 1, n) for b, n in enumerate(contexts)))
    want = torch.cat([sequences.oracle(b)[-1:] for b in range(len(contexts))])
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_writes_exactly_the_slots(kernels, case):
    sequences = Sequences(case)
    before = [cache.clone() for cache in sequences.kv]
    sequences.run(kernels, *last_rows())
    for cache, old, new in zip(sequences.kv, before, (1, 2), strict=True):
        for b, begin, end in last_rows():
            tokens = sequences.tokens[b][new][begin:end]
            old.view(-1, case.kv_heads, case.dim)[sequences.slots(b, begin, end)] = tokens.to(case.kv_dtype)
        torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_every_build_gives_the_same_bits(kernels, native, case):
    assert torch.equal(Sequences(case).run(kernels, *last_rows()), Sequences(case).run(native, *last_rows()))


@pytest.mark.parametrize("case", [c for c in CASES + ROUNDED if c.block_size % 16 == 0], ids=str)
def test_keys_by_feature_give_the_same_bits(kernels, case):
    usual, by_feature = Sequences(case), Sequences(case)
    k, v = by_feature.kv
    k = k.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    by_feature.kv = (k, v.transpose(1, 2).contiguous().transpose(1, 2))
    for rows in (last_rows(), [(b, n - 1, n) for b, n in enumerate(CONTEXTS)]):
        assert torch.equal(by_feature.run(kernels, *rows), usual.run(kernels, *rows))
    for a, b in zip(by_feature.kv, usual.kv, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (300, 0), (300, 260)])
def test_a_long_context_is_shared_out_without_changing_a_bit(kernels, window, sinks, rounded):
    """Spans go to different threads if there is little else to share; a chunk walks them one by one."""
    kv_dtype, tolerance = (torch.bfloat16, 2e-2) if rounded else (torch.float32, 1e-5)
    case, length = Case(6, 2, 32, 16, window, kv_dtype, sinks, rounded), 1000
    sequences = Sequences(case, [length, 1], [1, 1])
    whole = sequences.run(kernels, (0, 0, length))
    want = sequences.oracle(0)
    torch.testing.assert_close(whole.double(), want, rtol=tolerance, atol=tolerance)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for at in (255, 256, 257, 600, 999):
            assert torch.equal(sequences.run(kernels, (0, at, at + 1)), whole[at : at + 1])
        assert torch.equal(sequences.run(kernels, (1, 0, 1), (0, 990, 1000))[1:], whole[990:])


def test_strided_caches(native):
    case = CASES[0]
    dense, strided = Sequences(case), Sequences(case)
    both = torch.stack(dense.kv, dim=1)  # [blocks, 2, block_size, KVH, D]
    strided.kv = (both[:, 0], both[:, 1])
    assert torch.equal(strided.run(native, *last_rows()), dense.run(native, *last_rows()))


def test_large_scores_do_not_overflow(kernels):
    sequences = Sequences(CASES[0])
    sequences.tokens = [(q * 1e3, k * 10, v) for q, k, v in sequences.tokens]
    got = sequences.run(kernels, (5, 0, 200))
    torch.testing.assert_close(got.double(), sequences.oracle(5), rtol=1e-3, atol=1e-3)


def test_refuses_other_shapes(native):
    kv = (torch.zeros(2, 16, 1, 24), torch.zeros(2, 16, 1, 24))
    context = PagedContext(torch.tensor([0]), torch.tensor([0, 1]).int(), torch.ones(1).int(), torch.zeros(1, 1).int())
    q = torch.zeros(1, 2, 24)
    with pytest.raises(ValueError, match="multiple of 16"):
        native.paged_attention(q, q[:, :1], q[:, :1], kv, context, Scoring(1.0))

"""Every attention backend that this machine can run, against dense attention in float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.base import BACKENDS, AttentionShape
from engine.batch import ForwardBatch, build_batch
from engine.kernels import cpu
from engine.kv.base import GONE
from engine.select import Machine, refusals
from engine.types import SeqSlice

torch.set_num_threads(1)

# (start, length) per sequence: rows start .. start+length of it run in this step.
RAGGED = {
    "one_token": [(0, 1)],
    "decode": [(0, 1), (15, 1), (16, 1), (17, 1), (63, 1), (130, 1)],
    "whole_prompts": [(0, 5), (0, 16), (0, 33)],
    "chunk": [(16, 16), (7, 9)],
    "prefix_hit": [(32, 3), (48, 17)],
    "one_token_tail_of_a_block": [(0, 17), (16, 1), (31, 2)],
    "mixed": [(40, 1), (0, 20), (12, 1), (3, 30), (90, 1), (5, 4), (6, 4)],
}
HEADS = [(4, 4), (6, 2), (8, 1)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# float32: sums of a few hundred terms of size ~1. bfloat16: 8 bits of mantissa on outputs of size ~1.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def _refusals(cls, shape: AttentionShape, dtype: str, kv_dtype: str) -> list[str]:
    return refusals(cls.needs, Machine("cpu", dtype, kv_dtype, shape.head_dim, cpu.available()))


def _backend(name: str, shape: AttentionShape, block_size: int, dtype: str, kv_dtype: str):
    cls = BACKENDS.get(name)
    if bad := _refusals(cls, shape, dtype, kv_dtype):
        pytest.skip("; ".join(bad))
    return cls(shape, block_size)


class Case:
    """Random contexts laid out in shuffled blocks; everything not in them is NaN."""

    def __init__(self, slices, shape: AttentionShape, block_size: int, kv_dtype: str = "float32", seed: int = 0):
        gen = torch.Generator().manual_seed(seed)
        self.shape, self.block_size = shape, block_size
        counts = [-(-(start + length) // block_size) for start, length in slices]
        num_blocks = sum(counts) + 3
        ids = list(range(num_blocks))
        random.Random(seed).shuffle(ids)
        self.blocks = [[ids.pop() for _ in range(count)] for count in counts]
        size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        self.kv = tuple(torch.full(size, float("nan"), dtype=DTYPES[kv_dtype]) for _ in range(2))
        self.contexts = []  # per sequence: K, V [end, kv_heads, dim] as the cache holds them
        new_rows = []
        for (start, length), blocks in zip(slices, self.blocks, strict=True):
            pair = []
            for cache in self.kv:
                full = torch.randn(start + length, *size[2:], generator=gen).to(DTYPES[kv_dtype])
                where = torch.tensor([blocks[p // block_size] * block_size + p % block_size for p in range(start)])
                cache.view(-1, *size[2:])[where.long()] = full[:start]
                pair.append(full)
            self.contexts.append(pair)
            new_rows.append([full[start:] for full in pair])
        self.k, self.v = (torch.cat([rows[i] for rows in new_rows]).float() for i in range(2))
        self.q = torch.randn(self.k.shape[0], shape.num_heads, shape.head_dim, generator=gen)
        self.slices = slices

    def batch(self) -> ForwardBatch:
        plan = [
            SeqSlice(i, tuple(range(length)), start, tuple(blocks), sample=True)
            for i, ((start, length), blocks) in enumerate(zip(self.slices, self.blocks, strict=True))
        ]
        return build_batch(plan, self.block_size, torch.device("cpu"))

    def expected(self, dtype: torch.dtype) -> Tensor:
        out, row = [], 0
        repeats = self.shape.num_heads // self.shape.num_kv_heads
        for (start, length), (k, v) in zip(self.slices, self.contexts, strict=True):
            q = self.q[row : row + length].to(dtype).double()
            keys, values = (t.to(dtype).double().repeat_interleave(repeats, 1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, keys) * self.shape.scale
            if (cap := self.shape.softcap) is not None:
                scores = (scores / cap).tanh() * cap
            query_at = torch.arange(start, start + length)[:, None]
            key_at = torch.arange(start + length)[None, :]
            hidden = key_at > query_at
            if self.shape.window is not None:
                hidden |= (key_at <= query_at - self.shape.window) & (key_at >= self.shape.sinks)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
            row += length
        return torch.cat(out)

    def run(self, backend, dtype: torch.dtype) -> Tensor:
        batch = self.batch()
        q, k, v = (t.to(dtype) for t in (self.q, self.k, self.v))
        with torch.inference_mode():
            return backend.run(q, k, v, self.kv, batch, backend.plan(batch))

    def forget(self) -> None:
        """Put NaN where no row of this step looks any more, and take those blocks out of the tables."""
        window, sinks, size = self.shape.window, self.shape.sinks, self.block_size
        assert window is not None
        for (start, _), blocks in zip(self.slices, self.blocks, strict=True):
            for i in range(-(-sinks // size), (start - window + 1) // size):
                for cache in self.kv:
                    cache[blocks[i]] = float("nan")
                blocks[i] = GONE


def _shape(heads: int, kv_heads: int, window: int | None = None, head_dim: int = 64, sinks: int = 0) -> AttentionShape:
    return AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5, window, sinks)


@pytest.mark.parametrize("name", BACKENDS.names())
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("ragged", RAGGED)
def test_equals_dense_attention(name, heads, ragged):
    shape = _shape(*heads)
    backend = _backend(name, shape, 16, "float32", "float32")
    case = Case(RAGGED[ragged], shape, 16)
    torch.testing.assert_close(
        case.run(backend, torch.float32).double(), case.expected(torch.float32), atol=TOLERANCE["float32"], rtol=0
    )


@pytest.mark.parametrize("name", BACKENDS.names())
@pytest.mark.parametrize("window", [1, 5, 16, 40])
@pytest.mark.parametrize("ragged", ["decode", "mixed", "prefix_hit"])
def test_sliding_window(name, window, ragged):
    shape = _shape(6, 2, window)
    backend = _backend(name, shape, 16, "float32", "float32")
    case = Case(RAGGED[ragged], shape, 16)
    torch.testing.assert_close(
        case.run(backend, torch.float32).double(), case.expected(torch.float32), atol=TOLERANCE["float32"], rtol=0
    )


@pytest.mark.parametrize("name", BACKENDS.names())
@pytest.mark.parametrize("sinks", [0, 1, 4, 16, 40, 300])
@pytest.mark.parametrize("window", [1, 20, 64])
@pytest.mark.parametrize("slices", [[(700, 1), (30, 1)], [(0, 330)], [(500, 70), (620, 1), (0, 3), (40, 9)]])
def test_sinks_beside_a_window_and_nothing_between_them_is_read(name, slices, window, sinks):
    shape = _shape(6, 2, window, 16, sinks)
    backend = _backend(name, shape, 16, "float32", "float32")
    case = Case(slices, shape, 16)
    case.forget()
    torch.testing.assert_close(
        case.run(backend, torch.float32).double(), case.expected(torch.float32), atol=TOLERANCE["float32"], rtol=0
    )


@pytest.mark.parametrize("name", BACKENDS.names())
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("ragged", RAGGED)
def test_capped_scores(name, ragged, window):
    shape = replace(_shape(6, 2, window), softcap=1.5)
    backend = _backend(name, shape, 16, "float32", "float32")
    case = Case(RAGGED[ragged], shape, 16)
    torch.testing.assert_close(
        case.run(backend, torch.float32).double(), case.expected(torch.float32), atol=TOLERANCE["float32"], rtol=0
    )


@pytest.mark.parametrize("name", BACKENDS.names())
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_lower_precision(name, dtype, kv_dtype, softcap):
    shape = replace(_shape(6, 2), softcap=softcap)
    backend = _backend(name, shape, 16, dtype, kv_dtype)
    case = Case(RAGGED["mixed"], shape, 16, kv_dtype)
    out = case.run(backend, DTYPES[dtype])
    assert out.dtype == DTYPES[dtype]
    torch.testing.assert_close(out.double(), case.expected(DTYPES[dtype]), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("name", BACKENDS.names())
def test_new_rows_are_in_the_cache_and_nothing_else_is_touched(name):
    shape = _shape(4, 2)
    backend = _backend(name, shape, 16, "float32", "float32")
    case = Case(RAGGED["mixed"], shape, 16)
    before = [cache.clone() for cache in case.kv]
    case.run(backend, torch.float32)
    slots = case.batch().slots
    for cache, old, new in zip(case.kv, before, (case.k, case.v), strict=True):
        old.view(-1, 2, 64)[slots] = new
        assert torch.equal(cache.nan_to_num(7.0), old.nan_to_num(7.0))


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS.names())
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    slices=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 12)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 8, 16]),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([16, 64, 128]),
    window=st.sampled_from([None, 3, 24]),
    sinks=st.sampled_from([0, 0, 2, 17]),
)
def test_any_ragged_batch(name, slices, block_size, heads, head_dim, window, sinks):
    shape = _shape(*heads, window, head_dim, sinks)
    cls = BACKENDS.get(name)
    if _refusals(cls, shape, "float32", "float32"):
        return
    case = Case(slices, shape, block_size)
    if window is not None:
        case.forget()
    out = case.run(cls(shape, block_size), torch.float32)
    torch.testing.assert_close(out.double(), case.expected(torch.float32), atol=TOLERANCE["float32"], rtol=0)

"""Every attention backend over every narrow cache format: the same bytes in the cache, and attention to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.attention.base import BACKENDS, AttentionShape
from engine.attention.kv_codec import LARGEST, decode, encode
from engine.batch import build_batch
from engine.executor.settings import dtype_name
from engine.kernels import cpu
from engine.kv.scales import KVScales
from engine.kv.storage import KVLayout, KVStorage
from engine.select import Machine, refusals
from engine.types import SeqSlice

CPU = torch.device("cpu")
LENGTHS = (70, 33, 1, 300)
SHAPES = {
    "full": AttentionShape(6, 2, 64, 0.125),
    "window": AttentionShape(4, 4, 16, 0.25, window=20),
    "capped": AttentionShape(4, 2, 32, 0.2, softcap=9.0),
}
ROWS = sum(LENGTHS)


class Sequences:
    """Four sequences, whose blocks lie in turn."""

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, by_feature: bool, scales: KVScales | None = None
    ) -> None:
        gen = torch.Generator().manual_seed(0)
        self.q = torch.randn(ROWS, shape.num_heads, shape.head_dim, generator=gen)
        size = (ROWS, shape.num_kv_heads, shape.head_dim)
        self.k, self.v = (
            torch.randn(size, generator=gen) * torch.rand(*size[:2], 1, generator=gen) * 5 for _ in range(2)
        )
        self.k[:, :, 3] *= 8  # a feature larger than the others, as models have them
        layout = KVLayout(1, shape.num_kv_heads, shape.head_dim, 16, dtype, by_feature, scales)
        self.kv = KVStorage(layout, 80, CPU).layers[0]

    def run(self, backend, chunk: int) -> Tensor:
        """All rows, `chunk` of each sequence at a time, all sequences in each step."""
        out = self.q.new_empty(ROWS, self.q.shape[1] * self.q.shape[2])
        for start in range(0, max(LENGTHS), chunk):
            slices, rows, at = [], [], 0
            for i, length in enumerate(LENGTHS):
                end = min(length, start + chunk)
                if start < end:
                    blocks = tuple(range(i, i + 4 * -(-end // 16), 4))
                    slices.append(SeqSlice(i, (0,) * (end - start), start, blocks, sample=True))
                    rows += range(at + start, at + end)
                at += length
            batch = build_batch(slices, 16, CPU)
            out[rows] = backend.run(self.q[rows], self.k[rows], self.v[rows], self.kv, batch, backend.plan(batch))
        return out

    def given(self) -> list[Tensor | None]:
        """The scales of K and V, where they are not found as the cache is written."""
        return [None if any(scales.stride()) else scales[0, 0] for scales in self.kv[2:]]

    def stored(self) -> list[Tensor]:
        slots = torch.cat([(torch.arange(n) // 16 * 4 + i) * 16 + torch.arange(n) % 16 for i, n in enumerate(LENGTHS)])
        return [t.reshape(-1, *t.shape[2:])[slots] for t in self.kv]


def dense(s: Sequences, shape: AttentionShape, dtype: torch.dtype) -> Tensor:
    out, at = [], 0
    given = s.given()
    for length in LENGTHS:
        rows = slice(at, at + length)
        k, v = (decode(*encode(t[rows], dtype, scale)).double() for t, scale in zip((s.k, s.v), given, strict=True))
        k, v = (t.repeat_interleave(shape.num_heads // shape.num_kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", s.q[rows].double(), k) * shape.scale
        if shape.softcap is not None:
            scores = (scores / shape.softcap).tanh() * shape.softcap
        distance = torch.arange(length)[:, None] - torch.arange(length)
        seen = (distance >= 0) & (distance < (shape.window or length))
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1))
        at += length
    return torch.cat(out)


def make(name: str, shape: AttentionShape, dtype: torch.dtype):
    cls = BACKENDS.get(name)
    if bad := refusals(cls.needs, Machine("cpu", "float32", dtype_name(dtype), shape.head_dim, cpu.available())):
        pytest.skip("; ".join(bad))
    return cls(shape, 16)


def raw(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", BACKENDS.names())
def test_attends_to_what_the_format_says_and_stores_exactly_that(name, shape, dtype):
    torch.set_num_threads(1)
    backend = make(name, shape, dtype)
    s = Sequences(shape, dtype, backend.keys_by_feature(16))
    with torch.inference_mode():
        out = s.run(backend, 50)
    (k, ks), (v, vs) = encode(s.k, dtype), encode(s.v, dtype)
    for got, want in zip(s.stored(), (k, v, ks, vs), strict=True):
        assert torch.equal(raw(got), raw(want))
    torch.testing.assert_close(out.double(), dense(s, shape, dtype), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", BACKENDS.names())
def test_given_scales_are_used_and_what_exceeds_them_saturates(name, shape, dtype):
    torch.set_num_threads(1)
    backend = make(name, shape, dtype)
    s = Sequences(shape, dtype, backend.keys_by_feature(16), KVScales((20.0,), (3.0,)))
    with torch.inference_mode():
        out = s.run(backend, 50)
    ks, vs = s.given()
    assert [float(t[0]) * LARGEST[dtype] for t in (ks, vs)] == pytest.approx([20.0, 3.0], rel=2**-8)
    for got, x, scale in zip(s.stored(), (s.k, s.v), (ks, vs), strict=False):
        want, _ = encode(x, dtype, scale)
        assert torch.equal(raw(got), raw(want))
        assert int((want.float().abs() == LARGEST[dtype]).sum()) > 10, "some were too large"
    torch.testing.assert_close(out.double(), dense(s, shape, dtype), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("by_feature", [False, True])
def test_native_rows_do_not_depend_on_chunks(dtype, by_feature):
    torch.set_num_threads(1)
    outs = []
    for chunk in (1, 7, 64, 300):
        s = Sequences(SHAPES["full"], dtype, by_feature)
        outs.append(s.run(make("cpu_native", SHAPES["full"], dtype), chunk))
    assert all(torch.equal(out, outs[0]) for out in outs[1:])

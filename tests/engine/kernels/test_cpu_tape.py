from __future__ import annotations

import copy
import gc

import pytest
import torch

from engine.kernels.cpu.float_packing import pack_floats
from engine.kernels.cpu.ops import NativeKernels, PagedContext, Scoring
from engine.kernels.cpu.packing import pack_codes
from engine.kernels.cpu.tape import BufferPool

HEADS, KV_HEADS, DIM, HIDDEN = 4, 2, 16, 64


class Layer:
    """Every kernel once, over fixed inputs: what a decoder layer does to a decode batch."""

    def __init__(self, kernels: NativeKernels, rows: int) -> None:
        self.kernels, self.rows = kernels, rows
        self.table = _weight(50, HIDDEN, 8)
        self.q = pack_floats(torch.randn(HEADS * DIM, HIDDEN).bfloat16())
        self.kv_weight = _weight(2 * KV_HEADS * DIM, HIDDEN, 4)
        self.out = _weight(2 * HIDDEN, HEADS * DIM, 4)
        self.bias = torch.randn(2 * HIDDEN)
        self.norm, self.head_norm = torch.randn(HIDDEN), torch.randn(DIM)
        self.cos, self.sin = torch.randn(40, DIM // 2), torch.randn(40, DIM // 2)
        self.kv = (torch.zeros(2 * rows, 16, KV_HEADS, DIM), torch.zeros(2 * rows, 16, KV_HEADS, DIM))
        self.ids, self.positions = torch.zeros(2, rows, dtype=torch.int64)
        self.slots = torch.zeros(rows, dtype=torch.int64)
        self.starts = torch.arange(rows + 1, dtype=torch.int32)
        self.lengths = torch.zeros(rows, dtype=torch.int32)
        self.blocks = torch.arange(2 * rows, dtype=torch.int32).view(rows, 2)

    def first(self, rows: int) -> Layer:
        """The same, of its first rows."""
        few = copy.copy(self)
        few.rows = rows
        for name in ("ids", "positions", "slots", "starts", "lengths", "blocks"):
            setattr(few, name, getattr(self, name)[: rows + (name == "starts")])
        return few

    def set(self, step: int) -> None:
        self.ids[:] = torch.arange(self.rows) * 7 + step
        self.positions[:] = torch.arange(self.rows) + step
        self.lengths[:] = self.positions + 1
        at = self.positions // 16
        self.slots[:] = self.blocks.gather(1, at[:, None])[:, 0] * 16 + self.positions % 16

    def run(self) -> torch.Tensor:
        k = self.kernels
        x = k.packed_rows(self.table, self.ids)
        h = k.rms_norm(x, self.norm, 1e-5)
        parts = [k.float_linear(h, self.q, rounded=True), k.packed_linear(h, self.kv_weight)]
        qkv = k.side_by_side(parts).view(self.rows, -1, DIM)
        q, key, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        q, key = k.rms_norm(q, self.head_norm, 1e-5), k.rms_norm(key, self.head_norm, 1e-5)
        k.rope(q, key, self.cos, self.sin, self.positions)
        self.context = PagedContext(self.slots, self.starts, self.lengths, self.blocks)
        h = k.paged_attention(q, key, v, self.kv, self.context, Scoring(0.25))
        h = k.silu_mul(k.packed_linear(h, self.out, self.bias))
        return k.rms_norm_add(h, x, self.norm, 1e-5)[0]


def _weight(out: int, features: int, bits: int):
    d = torch.rand(out, features // 32) * 0.1
    return pack_codes(torch.randint(0, 2**bits, (out, features), dtype=torch.uint8), d, -d * 2 ** (bits - 1), bits)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_replay_is_the_same_step_on_what_the_inputs_hold_now(kernels, threads):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    recorded = Layer(kernels, 5)
    torch.manual_seed(0)
    eager = Layer(kernels, 5)
    for layer in (recorded, eager):
        layer.set(0)
    pool = BufferPool(8)
    with kernels.record(pool) as tape:
        out = recorded.run()
    assert torch.equal(out, eager.run())
    assert len(tape) == 13
    out = pool.alias(out)[:5]
    for step in range(1, 20):
        for layer in (recorded, eager):
            layer.set(step)
        tape.replay()
        assert torch.equal(out, eager.run())
    assert all(torch.equal(a, b) for a, b in zip(recorded.kv, eager.kv, strict=True))


def test_a_replay_may_have_any_number_of_rows_and_sequences(kernels):
    torch.manual_seed(0)
    most = Layer(kernels, 8)
    most.set(0)
    pool = BufferPool(8)
    expected = most.run()
    few = most.first(2)
    with kernels.record(pool) as tape:
        out = few.run()
    assert tape.row_counts == {2}
    assert torch.equal(out, expected[:2])
    out = pool.alias(out)
    for count in (8, 1, 5, 2):
        out.zero_()
        tape.replay(count, count)
        assert torch.equal(out[:count], expected[:count]) and not out[count:].any()
    with pytest.raises(ValueError, match="9 rows, the pool's buffers have 8"):
        tape.replay(9, 9)


def test_calls_of_several_numbers_of_rows_are_told(native):
    layer = Layer(native, 2)
    with native.record(BufferPool(4)) as tape:
        native.packed_linear(torch.randn(2, HIDDEN), layer.kv_weight)
        native.silu_mul(torch.randn(3, HIDDEN))
    assert tape.row_counts == {2, 3}


def test_an_error_while_recording_ends_the_recording(native):
    layer = Layer(native, 2)
    with pytest.raises(ValueError, match="features"), native.record(BufferPool(2)):
        native.packed_linear(torch.randn(2, 96), layer.kv_weight)
    outside = native.packed_linear(torch.randn(2, HIDDEN), layer.kv_weight)
    with native.record(BufferPool(2)) as tape:
        pass
    assert len(tape) == 0
    tape.replay()
    assert outside.shape == (2, 2 * KV_HEADS * DIM)


def test_a_buffer_is_taken_as_long_as_a_view_lives():
    pool = BufferPool(4)
    first = pool.empty(3, 32)
    where = first.data_ptr()
    assert where % 64 == 0
    view = first.view(3, 2, 16)[:, 1:]
    del first
    gc.collect()
    other = pool.empty(4, 32)
    assert other.data_ptr() != where
    del view
    assert pool.empty(1, 32).data_ptr() == where
    assert pool.empty(1, 48).data_ptr() not in (where, other.data_ptr())


def test_an_alias_does_not_keep_a_buffer_taken():
    pool = BufferPool(4)
    taken = pool.empty(3, 32)
    alias = pool.alias(taken)
    taken.fill_(7)
    assert alias.shape == (4, 32) and (alias[:3] == 7).all()
    where = taken.data_ptr()
    del taken
    assert pool.empty(2, 32).data_ptr() == where == alias.data_ptr()


def test_a_pool_has_so_many_rows():
    with pytest.raises(ValueError, match="5 rows, the pool's buffers have 4"):
        BufferPool(4).empty(5, 32)

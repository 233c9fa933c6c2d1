"""Checked wrappers over the compiled kernels. Tensors are float32 on the CPU unless said otherwise."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels.cpu.build import library
from engine.kernels.cpu.float_packing import FloatWeight
from engine.kernels.cpu.packing import PackedWeight
from engine.kernels.cpu.pages import LargePages
from engine.kernels.cpu.tape import BufferPool, NativeFunction, Tape
from engine.kernels.cpu.tiles import usable
from engine.kv.storage import SCALE_DTYPE, SCALED_DTYPES, LayerKV
from engine.select import Needs

__all__ = ["FloatWeight", "NativeKernels", "PackedWeight", "PagedContext"]

KV_TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
}
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 16
KEY_GROUP = 16  # keys that a vector holds
_Weight = TypeVar("_Weight", PackedWeight, FloatWeight)
_EXACT, _ROUNDED, _TILED = range(3)  # how float_linear takes its activations


@dataclass(frozen=True, slots=True)
class PagedContext:
    """One batch's slots [T] int64, query_starts [B + 1], seq_lens [B] and block_table [B, max_blocks] int32,
    all contiguous; the meanings are ForwardBatch's. `arguments` is what the C function takes of them."""

    slots: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    block_table: Tensor
    arguments: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tensors = (self.slots, self.query_starts, self.seq_lens, self.block_table)
        for t, dtype in zip(tensors, (torch.int64, torch.int32, torch.int32, torch.int32), strict=True):
            if t.dtype is not dtype or not t.is_contiguous() or not t.is_cpu:
                raise ValueError(f"need contiguous {dtype} on the CPU, got {t.dtype} {t.device} {t.stride()}")
        pointers = (t.data_ptr() for t in tensors)
        num_seqs, max_blocks = self.block_table.shape
        object.__setattr__(self, "arguments", (*pointers, max_blocks, num_seqs))


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the scores of paged_attention are made from q·k.

    `scale` multiplies q·k. With a `window` a row sees the last `window` tokens of its sequence, itself included, and
    besides the first `sinks`. `softcap` c: a scaled q·k counts as c * tanh(q·k / c). `rounded`: beside a bfloat16 cache
    q and the softmax are rounded to bfloat16 too on machines that multiply pairs of bfloat16, which do that twice as
    fast. Otherwise every machine gives the same bits.
    """

    scale: float
    window: int | None = None
    sinks: int = 0
    rounded: bool = False
    softcap: float | None = None


class NativeKernels:
    """The compiled kernels as methods; each runs on at most torch.get_num_threads() threads.

    A rank's layers share one instance, so that what they call can be recorded. One thread at a time.
    """

    needs: ClassVar[Needs] = Needs(
        devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), native=True, invariant=True
    )

    def __init__(self, lib: ctypes.CDLL | None = None, tiles: bool | None = None) -> None:
        """`lib` None: the machine's library. `tiles`: use the processor's matrix tiles, or what stands in for them in
        `lib`; None: if they work. Raises ConfigError where the library cannot be built."""
        lib = lib or library()
        if lib is None:
            raise ConfigError("the compiled CPU kernels are not available on this machine")
        self._lib = lib
        self._tiles = usable(lib) if tiles is None else tiles
        self._tape: Tape | None = None
        self._pages = LargePages()
        self._packed_linear = NativeFunction(lib, "sluice_packed_linear", "Pqr Pqqqqqq PPqqqq")
        self._packed_rows = NativeFunction(lib, "sluice_packed_rows", "Pqqqqqq PPrq")
        self._float_linear = NativeFunction(lib, "sluice_float_linear", "Pqr Pqqq PPqqq")
        self._float_rows = NativeFunction(lib, "sluice_float_rows", "Pqqq PPrq")
        self._attention = NativeFunction(lib, "sluice_attention", "PPPqqq PPq qqqq qqqq PPqqq q PPPP qsqqqqq ddPqq")
        self._rms_norm = NativeFunction(lib, "sluice_rms_norm", "Pqqq Pq PdP rq")
        self._rope = NativeFunction(lib, "sluice_rope", "Pqq Pqqq PPqP rq")
        self._silu_mul = NativeFunction(lib, "sluice_silu_mul", "Pqq Prq")
        self._gelu_mul = NativeFunction(lib, "sluice_gelu_mul", "Pqq Prq")
        self._scale = NativeFunction(lib, "sluice_scale", "Pqq drq")
        self._softcap = NativeFunction(lib, "sluice_softcap", "Pqq drq")
        self._copy_columns = NativeFunction(lib, "sluice_copy_columns", "Pqq Pqrq")

    @contextmanager
    def record(self, buffers: BufferPool) -> Iterator[Tape]:
        """Calls run as always and are noted on the tape, which can be replayed once the block is left. Their
        outputs come from `buffers`. Ops of others (torch, numpy) are not noticed."""
        assert self._tape is None, "recording already"
        tape = self._tape = Tape(self._lib, buffers)
        try:
            yield tape
        finally:
            self._tape = None
            tape.finish()

    def hold(self, weight: _Weight) -> _Weight:
        """The same weight where these kernels read it fastest: beside those held before it. Those that a step reads
        one after the other are best held in that order."""
        return replace(weight, data=self._pages.place(weight.data))

    def packed_linear(self, x: Tensor, w: PackedWeight, bias: Tensor | None = None, narrow: bool = False) -> Tensor:
        """`x` [T, in] @ w^T + bias -> [T, out]. Off the float32 result by the rounding of x to 16 bits per 32
        features; `narrow`: to 8 bits, which is nearly twice as fast and takes a weight of 4. bias is [out], contiguous.
        """
        _check_linear(x, w, bias)
        if narrow and w.bits != 4:
            raise ValueError(f"narrow activations need a weight of 4 bits, got {w.bits}")
        y = self._empty(x.shape[0], w.out_features)
        self._run(
            self._packed_linear, x.data_ptr(), x.stride(0), x.shape[0], *w.arguments,
            0 if bias is None else bias.data_ptr(), y.data_ptr(), w.out_features, narrow, self._tiles,
            torch.get_num_threads(),
        )  # fmt: skip
        return y

    def float_linear(self, x: Tensor, w: FloatWeight, bias: Tensor | None = None, rounded: bool = False) -> Tensor:
        """`x` [T, in] @ w^T + bias -> [T, out], summed in float32. `rounded`: x is first rounded to bfloat16, which
        machines that multiply pairs of bfloat16 do twice as fast. Otherwise every machine gives the same bits."""
        _check_linear(x, w, bias)
        product = _EXACT if not rounded else _TILED if self._tiles else _ROUNDED
        y = self._empty(x.shape[0], w.out_features)
        self._run(
            self._float_linear, x.data_ptr(), x.stride(0), x.shape[0], *w.arguments,
            0 if bias is None else bias.data_ptr(), y.data_ptr(), w.out_features, product, torch.get_num_threads(),
        )  # fmt: skip
        return y

    def packed_rows(self, w: PackedWeight, ids: Tensor) -> Tensor:
        """Rows `ids` [T] int64 of the weight, [T, in]; NaN for an id that it does not have."""
        return self._rows(self._packed_rows, w, ids)

    def float_rows(self, w: FloatWeight, ids: Tensor) -> Tensor:
        """See packed_rows()."""
        return self._rows(self._float_rows, w, ids)

    def _rows(self, function: NativeFunction, w: PackedWeight | FloatWeight, ids: Tensor) -> Tensor:
        if ids.dtype is not torch.int64 or not ids.is_contiguous():
            raise ValueError(f"ids must be contiguous int64, got {ids.dtype} {ids.stride()}")
        out = self._empty(ids.shape[0], w.in_features)
        self._run(function, *w.arguments, ids.data_ptr(), out.data_ptr(), ids.shape[0], torch.get_num_threads())
        return out

    def paged_attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, context: PagedContext, scoring: Scoring
    ) -> Tensor:
        """Write k, v [T, KVH, D] at the slots of kv, then attend q [T, H, D]; returns [T, H * D].

        kv is of a type in KV_TYPES, with the features of a head side by side. K is read faster if the slots of a
        block are side by side instead, which takes a block_size that is a multiple of 16. D is a multiple of 16 up
        to 256. The rows of sequence b are the last of its seq_lens[b] tokens. Scales whose strides are all 0 are one
        for all, given. Raises ValueError for tensors whose shapes or strides the kernel cannot read.
        """
        rows, heads, dim = q.shape
        k_cache, v_cache, *scales = kv
        _, block_size, kv_heads, _ = k_cache.shape
        _check_heads(q)
        _check_heads(k)
        _check_heads(v)
        if dim % HEAD_DIM_STEP or dim > MAX_HEAD_DIM or heads % kv_heads:
            raise ValueError(f"head_dim must be a multiple of 16 up to 256 and heads of kv_heads, got q {q.shape}")
        if k.shape != (rows, kv_heads, dim) or v.shape != k.shape or context.slots.shape[0] != rows:
            raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape}, slots and K cache {k_cache.shape} disagree")
        if v_cache.shape != k_cache.shape or v_cache.dtype is not k_cache.dtype:
            raise ValueError(f"the caches differ: K {k_cache.shape} {k_cache.dtype}, V {v_cache.shape} {v_cache.dtype}")
        scale_arguments = _scale_arguments(k_cache, scales)
        by_feature = k_cache.stride(1) == 1 and block_size % KEY_GROUP == 0
        if v_cache.stride(3) != 1 or (k_cache.stride(3) != 1 and not by_feature):
            raise ValueError(f"cannot read caches with strides {k_cache.stride()}, {v_cache.stride()}")
        out = self._empty(rows, heads * dim)
        self._run(
            self._attention, q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0),
            k_cache.data_ptr(), v_cache.data_ptr(), KV_TYPES[k_cache.dtype], *k_cache.stride(), *v_cache.stride(),
            *scale_arguments, block_size, *context.arguments, heads, kv_heads, dim,
            -1 if scoring.window is None else scoring.window, 0 if scoring.window is None else scoring.sinks,
            scoring.scale, scoring.softcap or 0.0, out.data_ptr(), scoring.rounded, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Kernels.rms_norm()."""
        return self._norm(x, None, weight, eps)

    def rms_norm_add(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Writes the sum into `residual` and returns it."""
        return self._norm(x, residual, weight, eps), residual

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        _check(weight)
        if x.dim() == 3:
            _check_heads(x)
        else:
            _check(x)
        rows, features = x.shape[0], x.shape[-1]
        heads = x.shape[1] if x.dim() == 3 else 1
        pointer, stride = 0, 0
        if residual is not None:
            _check(residual)
            pointer, stride = residual.data_ptr(), residual.stride(0)
        if weight.shape != (features,) or (residual is not None and residual.shape != x.shape):
            raise ValueError(f"x {x.shape} and its residual or weight {weight.shape} disagree")
        out = self._empty(rows, heads * features)
        self._run(
            self._rms_norm, x.data_ptr(), x.stride(0), heads, features, pointer, stride, weight.data_ptr(), eps,
            out.data_ptr(), rows, torch.get_num_threads(),
        )  # fmt: skip
        return out.view(x.shape)

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """See Kernels.rope(). Raises ValueError for tables that are not contiguous or heads that are not dense."""
        rows, heads, dim = q.shape
        half = cos.shape[1]
        _check_heads(q)
        _check_heads(k)
        if not (cos.is_contiguous() and sin.is_contiguous()) or sin.shape != cos.shape or 2 * half > dim:
            raise ValueError(f"cos and sin must be contiguous and alike, at most head_dim / 2 wide; got {cos.shape}")
        if positions.dtype is not torch.int64 or positions.shape != (rows,) or k.shape[0] != rows:
            raise ValueError(f"positions must be int64, one per row; got {positions.dtype} {positions.shape}")
        self._run(
            self._rope, q.data_ptr(), q.stride(0), heads, k.data_ptr(), k.stride(0), k.shape[1], dim, cos.data_ptr(),
            sin.data_ptr(), half, positions.data_ptr(), rows, torch.get_num_threads(),
        )  # fmt: skip

    def silu_mul(self, x: Tensor) -> Tensor:
        """See Kernels.silu_mul()."""
        return self._gated(self._silu_mul, x)

    def gelu_mul(self, x: Tensor) -> Tensor:
        """See Kernels.gelu_mul()."""
        return self._gated(self._gelu_mul, x)

    def _gated(self, function: NativeFunction, x: Tensor) -> Tensor:
        _check(x)
        rows, features = x.shape
        out = self._empty(rows, features // 2)
        self._run(function, x.data_ptr(), x.stride(0), features // 2, out.data_ptr(), rows, torch.get_num_threads())
        return out

    def scale(self, x: Tensor, factor: float) -> None:
        """See Kernels.scale()."""
        self._in_place(self._scale, x, factor)

    def softcap(self, x: Tensor, cap: float) -> None:
        """See Kernels.softcap()."""
        self._in_place(self._softcap, x, cap)

    def _in_place(self, function: NativeFunction, x: Tensor, number: float) -> None:
        _check(x)
        rows, features = x.shape
        self._run(function, x.data_ptr(), x.stride(0), features, number, rows, torch.get_num_threads())

    def side_by_side(self, parts: Sequence[Tensor]) -> Tensor:
        """Tensors [T, n_i] as one [T, sum of n_i]."""
        rows = parts[0].shape[0]
        out = self._empty(rows, sum(part.shape[1] for part in parts))
        at = 0
        for part in parts:
            _check(part)
            if part.shape[0] != rows:
                raise ValueError(f"parts have {rows} and {part.shape[0]} rows")
            self._run(
                self._copy_columns, part.data_ptr(), part.stride(0), part.shape[1],
                out.data_ptr() + at * out.element_size(), out.stride(0), rows, torch.get_num_threads(),
            )  # fmt: skip
            at += part.shape[1]
        return out

    def _empty(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns) if self._tape is None else self._tape.buffers.empty(rows, columns)

    def _run(self, function: NativeFunction, *arguments: int | float) -> None:
        packed = function.pack(*arguments)
        function.call(packed)
        if self._tape is not None:
            self._tape.append(function, packed)


def _check(x: Tensor) -> None:
    if x.dtype is not torch.float32 or x.stride(-1) != 1 or not x.is_cpu:
        raise ValueError(f"need float32 on the CPU with unit last stride, got {x.dtype} {x.device} {x.stride()}")


def _scale_arguments(cache: Tensor, scales: Sequence[Tensor]) -> tuple[int, ...]:
    """The fields of the C struct that say where the scales of a cache are."""
    if cache.dtype not in SCALED_DTYPES:
        return (0,) * 5
    if [(s.shape, s.dtype) for s in scales] != [(cache.shape[:3], SCALE_DTYPE)] * 2:
        got = [(tuple(s.shape), s.dtype) for s in scales]
        raise ValueError(f"a {cache.dtype} cache needs {SCALE_DTYPE} scales of K and V per slot and head, got {got}")
    keys, values = scales
    if keys.stride() != values.stride():
        raise ValueError(f"the scales of K and V must be laid out alike, got {keys.stride()} and {values.stride()}")
    return (keys.data_ptr(), values.data_ptr(), *keys.stride())


def _check_linear(x: Tensor, w: PackedWeight | FloatWeight, bias: Tensor | None) -> None:
    if x.shape[1] != w.in_features:
        raise ValueError(f"x has {x.shape[1]} features, the weight takes {w.in_features}")
    _check(x)
    if bias is not None:
        _check(bias)
        if bias.shape != (w.out_features,):
            raise ValueError(f"bias is {tuple(bias.shape)}, the weight has {w.out_features} output features")


def _check_heads(x: Tensor) -> None:
    """[T, heads, dim] whose rows may be strided but whose heads are dense."""
    _check(x)
    if x.shape[1] > 1 and x.stride(1) != x.shape[2]:
        raise ValueError(f"heads must be dense within a row, got {x.shape} with strides {x.stride()}")

"""Thin checked wrappers over the compiled kernels. Tensors are float32 on the CPU unless said otherwise."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels.cpu.build import library
from engine.kernels.cpu.packing import PackedWeight, pack_codes, unpack
from engine.select import Needs

__all__ = ["NativeKernels", "PackedWeight", "PagedContext", "pack_codes", "packed_linear", "unpack"]

KV_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 16


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


class NativeKernels:
    """The compiled kernels as methods; each runs on at most torch.get_num_threads() threads."""

    needs: ClassVar[Needs] = Needs(devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), native=True)

    def __init__(self, lib: ctypes.CDLL | None = None) -> None:
        """`lib` None: the machine's library. Raises ConfigError where it cannot be built."""
        lib = lib or library()
        if lib is None:
            raise ConfigError("the compiled CPU kernels are not available on this machine")
        self._packed_linear = _function(lib, "sluice_packed_linear", "piipiiiiiipi")
        self._attention = _function(lib, "sluice_attention", "pipipippiiiiippppiiiiiifpi")
        self._rms_norm = _function(lib, "sluice_rms_norm", "pipipiifpi")
        self._rope = _function(lib, "sluice_rope", "piipiiippipii")
        self._silu_mul = _function(lib, "sluice_silu_mul", "piiipi")

    def packed_linear(self, x: Tensor, w: PackedWeight) -> Tensor:
        """x [T, in] @ w^T -> [T, out]. Off the float32 result by the rounding of x to 16 bits per 32 features."""
        rows, features = x.shape
        if features != w.in_features:
            raise ValueError(f"x has {features} features, the weight takes {w.in_features}")
        _check(x)
        y = torch.empty(rows, w.out_features)
        _, groups, block_bytes = w.data.shape
        self._packed_linear(
            x.data_ptr(), x.stride(0), rows, w.data.data_ptr(), block_bytes, groups, w.out_features, w.bits,
            w.half, w.center, y.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return y

    def paged_attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: tuple[Tensor, Tensor], context: PagedContext, scale: float,
        window: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Write k, v [T, KVH, D] at the slots of kv, then attend q [T, H, D]; returns [T, H * D].

        kv = (K, V), each [blocks, block_size, KVH, D] in float32, float16 or bfloat16. D is a multiple of 16
        up to 256. The rows of sequence b are the last of its seq_lens[b] tokens.
        """
        rows, heads, dim = q.shape
        k_cache, v_cache = kv
        _, block_size, kv_heads, _ = k_cache.shape
        block_stride, slot_stride, head_stride, last = strides = k_cache.stride()
        _check_heads(q)
        _check_heads(k)
        _check_heads(v)
        if dim % HEAD_DIM_STEP or dim > MAX_HEAD_DIM or heads % kv_heads:
            raise ValueError(f"head_dim must be a multiple of 16 up to 256 and heads of kv_heads, got q {q.shape}")
        if k.shape != (rows, kv_heads, dim) or v.shape != k.shape or context.slots.shape[0] != rows:
            raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape}, slots and K cache {k_cache.shape} disagree")
        if v_cache.stride() != strides or v_cache.dtype is not k_cache.dtype or last != 1:
            raise ValueError("the K and V caches must have the same dtype and strides, the last 1")
        out = torch.empty(rows, heads * dim)
        self._attention(
            q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), k_cache.data_ptr(),
            v_cache.data_ptr(), KV_TYPES[k_cache.dtype], block_stride, slot_stride, head_stride, block_size,
            *context.arguments, heads, kv_heads, dim, -1 if window is None else window, scale, out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)

    def rms_norm_add(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Writes the sum into `residual` and returns it."""
        return self._norm(x, residual, weight, eps), residual

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        _check(x)
        _check(weight)
        rows, features = x.shape
        pointer, stride = None, 0
        if residual is not None:
            _check(residual)
            pointer, stride = residual.data_ptr(), residual.stride(0)
        if weight.shape != (features,) or (residual is not None and residual.shape != x.shape):
            raise ValueError(f"x {x.shape} and its residual or weight {weight.shape} disagree")
        out = torch.empty(rows, features)
        self._rms_norm(
            x.data_ptr(), x.stride(0), pointer, stride, weight.data_ptr(), rows, features, eps, out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        rows, heads, dim = q.shape
        half = cos.shape[1]
        _check_heads(q)
        _check_heads(k)
        if not (cos.is_contiguous() and sin.is_contiguous()) or sin.shape != cos.shape or 2 * half > dim:
            raise ValueError(f"cos and sin must be contiguous and alike, at most head_dim / 2 wide; got {cos.shape}")
        if positions.dtype is not torch.int64 or positions.shape != (rows,) or k.shape[0] != rows:
            raise ValueError(f"positions must be int64, one per row; got {positions.dtype} {positions.shape}")
        self._rope(
            q.data_ptr(), q.stride(0), heads, k.data_ptr(), k.stride(0), k.shape[1], dim, cos.data_ptr(),
            sin.data_ptr(), half, positions.data_ptr(), rows, torch.get_num_threads(),
        )  # fmt: skip

    def silu_mul(self, x: Tensor) -> Tensor:
        _check(x)
        rows, features = x.shape
        out = torch.empty(rows, features // 2)
        self._silu_mul(x.data_ptr(), x.stride(0), rows, features // 2, out.data_ptr(), torch.get_num_threads())
        return out


@cache
def _default() -> NativeKernels:
    return NativeKernels()


def packed_linear(x: Tensor, w: PackedWeight) -> Tensor:
    """NativeKernels.packed_linear with the machine's library. Raises ConfigError where there is none."""
    return _default().packed_linear(x, w)


def _check(x: Tensor) -> None:
    if x.dtype is not torch.float32 or x.stride(-1) != 1 or not x.is_cpu:
        raise ValueError(f"need float32 on the CPU with unit last stride, got {x.dtype} {x.device} {x.stride()}")


def _check_heads(x: Tensor) -> None:
    """[T, heads, dim] whose rows may be strided but whose heads are dense."""
    _check(x)
    if x.shape[1] > 1 and x.stride(1) != x.shape[2]:
        raise ValueError(f"heads must be dense within a row, got {x.shape} with strides {x.stride()}")


def _function(lib: ctypes.CDLL, name: str, kinds: str) -> Callable[..., Any]:
    """A C function; kinds: p pointer, i int64, f float."""
    types: dict[str, Any] = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
    function = lib[name]
    function.argtypes = [types[kind] for kind in kinds]
    function.restype = None
    return function

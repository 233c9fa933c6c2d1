"""GGUF block-quantized weights."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.errors import ModelFileError
from engine.kernels.cpu.float_packing import FloatWeight, pack_floats
from engine.kernels.cpu.ops import NativeKernels
from engine.kernels.cpu.packing import PackedWeight, pack_codes
from engine.quant import gguf_codecs
from engine.quant.base import Axis, ParamSpec, Ready, Stored
from engine.select import Needs


class Gguf:
    """`blocks` uint8 [out, n_blocks, block_bytes], of one ggml type.

    With `native`, everything goes through the CPU kernels in float32: types that have codes stay quantized in
    memory, others are dequantized once. Otherwise finish() dequantizes once to `dtype`.

    `narrow`: beside codes of 4 bits, whose own rounding is ten times coarser, activations have 8 bits per group of 32:
    apply() is then off by up to 2 % of the largest output. Types without codes are kept as float16.
    """

    needs: ClassVar[Needs] = Needs()
    tolerance: ClassVar[float] = 1e-4

    def __init__(self, kind: str, dtype: torch.dtype, native: NativeKernels | None, narrow: bool = False) -> None:
        self.kind = kind
        self.dtype = dtype
        self._codec = gguf_codecs.codec(kind)
        self._native = native
        self._narrow = narrow

    def params(self, in_features: int, out_features: int) -> dict[str, ParamSpec]:
        """See QuantFormat.params()."""
        block, block_bytes = self._codec.block, self._codec.block_bytes
        if in_features % block:
            raise ModelFileError(f"{in_features} input features are not a multiple of {self.kind}'s block of {block}")
        shape = (out_features, in_features // block, block_bytes)
        return {"blocks": ParamSpec(shape, torch.uint8, out=Axis(0), inp=Axis(1, block))}

    def finish(self, stored: Stored) -> Ready:
        """See QuantFormat.finish()."""
        blocks = stored["blocks"]
        if self._native is None:
            return {"weight": self._codec.to_float(blocks).to(self.dtype)}
        if self._codec.decode is None:
            weight = self._codec.to_float(blocks)
            narrow = weight.half() if self._narrow else weight
            return {"weight": self._native.hold(pack_floats(narrow if narrow.isfinite().all() else weight))}
        c = self._codec.decode(blocks)
        return {"weight": self._native.hold(pack_codes(c.codes, c.d, c.m, c.bits))}

    def apply(self, x: Tensor, ready: Ready, bias: Tensor | None = None) -> Tensor:
        """See QuantFormat.apply()."""
        weight: Tensor | PackedWeight | FloatWeight = ready["weight"]
        if self._native is None:
            assert isinstance(weight, Tensor)
            return functional.linear(x, weight, bias)
        wide, bias = x.float(), None if bias is None else bias.float()
        if isinstance(weight, PackedWeight):
            return self._native.packed_linear(wide, weight, bias, self._narrow and weight.bits == 4).to(x.dtype)
        assert isinstance(weight, FloatWeight)
        return self._native.float_linear(wide, weight, bias).to(x.dtype)

    def weight_bytes(self, ready: Ready, rows: int) -> int:
        """See QuantFormat.weight_bytes()."""
        weight: Tensor | PackedWeight | FloatWeight = ready["weight"]
        return weight.nbytes

    def dequantize(self, stored: Stored) -> Tensor:
        """See QuantFormat.dequantize()."""
        return self._codec.to_float(stored["blocks"])

    def rows(self, ready: Ready, ids: Tensor) -> Tensor:
        """See QuantFormat.rows()."""
        weight = ready["weight"]
        if self._native is None:
            return functional.embedding(ids, weight)
        packed = isinstance(weight, PackedWeight)
        rows = self._native.packed_rows(weight, ids) if packed else self._native.float_rows(weight, ids)
        return rows.to(self.dtype)

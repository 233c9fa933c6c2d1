"""GGUF block-quantized weights."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.errors import ModelFileError
from engine.kernels.cpu.ops import NativeKernels
from engine.kernels.cpu.packing import PackedWeight, pack_codes
from engine.quant import gguf_codecs
from engine.quant.base import Axis, ParamSpec, Ready, Stored
from engine.select import Needs


class Gguf:
    """`blocks` uint8 [out, n_blocks, block_bytes], of one ggml type.

    With `native`, types that have codes stay quantized in memory and go through the packed CPU kernels, in
    float32. Otherwise finish() dequantizes once to `dtype`.
    """

    needs: ClassVar[Needs] = Needs()
    tolerance: ClassVar[float] = 1e-4

    def __init__(self, kind: str, dtype: torch.dtype, native: NativeKernels | None) -> None:
        self.kind = kind
        self.dtype = dtype
        self._codec = gguf_codecs.codec(kind)
        self._native = native if self._codec.decode else None

    def params(self, in_features: int, out_features: int) -> dict[str, ParamSpec]:
        block, block_bytes = self._codec.block, self._codec.block_bytes
        if in_features % block:
            raise ModelFileError(f"{in_features} input features are not a multiple of {self.kind}'s block of {block}")
        shape = (out_features, in_features // block, block_bytes)
        return {"blocks": ParamSpec(shape, torch.uint8, out=Axis(0), inp=Axis(1, block))}

    def finish(self, stored: Stored) -> Ready:
        blocks = stored["blocks"]
        if self._native is not None and self._codec.decode is not None:
            c = self._codec.decode(blocks)
            return {"packed": pack_codes(c.codes, c.d, c.m, c.bits)}
        return {"weight": self._codec.to_float(blocks).to(self.dtype)}

    def apply(self, x: Tensor, ready: Ready, bias: Tensor | None = None) -> Tensor:
        if self._native is None:
            return functional.linear(x, ready["weight"], bias)
        wide = None if bias is None else bias.float()
        return self._native.packed_linear(x.float(), ready["packed"], wide).to(x.dtype)

    def weight_bytes(self, ready: Ready, rows: int) -> int:
        weight: Tensor | PackedWeight = ready["weight" if self._native is None else "packed"]
        return weight.nbytes

    def dequantize(self, stored: Stored) -> Tensor:
        return self._codec.to_float(stored["blocks"])

    def rows(self, ready: Ready, ids: Tensor) -> Tensor:
        if self._native is None:
            return functional.embedding(ids, ready["weight"])
        return self._native.packed_rows(ready["packed"], ids).to(self.dtype)

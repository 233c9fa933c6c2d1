"""Float weights as they are."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.cpu.float_packing import FloatWeight, pack_floats
from engine.kernels.cpu.ops import NativeKernels
from engine.quant.base import Axis, ParamSpec, Ready, Stored
from engine.select import Needs


class Unquantized:
    """`weight` [out, in], stored in any float type.

    Without `native`, converted once to `dtype`, that of the activations. With it, packed for the CPU kernels and
    converted to `weight_dtype` (None: `dtype`) unless that holds the stored type's every value. Sums are in
    float32; a `weight_dtype` of bfloat16 rounds what is multiplied with the weight as well.
    """

    needs: ClassVar[Needs] = Needs()
    tolerance: ClassVar[float] = 1e-5

    def __init__(
        self, dtype: torch.dtype, native: NativeKernels | None = None, weight_dtype: torch.dtype | None = None
    ) -> None:
        self.dtype = dtype
        self._native = native
        self._weight_dtype = weight_dtype or dtype

    def params(self, in_features: int, out_features: int) -> dict[str, ParamSpec]:
        """See QuantFormat.params()."""
        return {"weight": ParamSpec((out_features, in_features), self.dtype, out=Axis(0), inp=Axis(1))}

    def finish(self, stored: Stored) -> Ready:
        """See QuantFormat.finish()."""
        weight = stored["weight"]
        if self._native is None:
            return {"weight": weight.to(self.dtype).contiguous()}
        exact = torch.promote_types(weight.dtype, self._weight_dtype) is self._weight_dtype
        return {"weight": self._native.hold(pack_floats(weight if exact else weight.to(self._weight_dtype)))}

    def apply(self, x: Tensor, ready: Ready, bias: Tensor | None = None) -> Tensor:
        """See QuantFormat.apply()."""
        if self._native is None:
            return functional.linear(x, ready["weight"], bias)
        wide = None if bias is None else bias.float()
        rounded = self._weight_dtype is torch.bfloat16
        return self._native.float_linear(x.float(), ready["weight"], wide, rounded).to(x.dtype)

    def weight_bytes(self, ready: Ready, rows: int) -> int:
        """See QuantFormat.weight_bytes()."""
        weight: Tensor | FloatWeight = ready["weight"]
        return weight.nbytes

    def dequantize(self, stored: Stored) -> Tensor:
        """See QuantFormat.dequantize()."""
        return stored["weight"].float()

    def rows(self, ready: Ready, ids: Tensor) -> Tensor:
        """See QuantFormat.rows()."""
        if self._native is None:
            return functional.embedding(ids, ready["weight"])
        return self._native.float_rows(ready["weight"], ids).to(self.dtype)

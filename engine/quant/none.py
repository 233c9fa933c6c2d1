"""Float weights as they are."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.quant.base import Axis, ParamSpec, Ready, Stored
from engine.select import Needs


class Unquantized:
    """`weight` [out, in], stored in any float type, converted once to the compute dtype."""

    needs: ClassVar[Needs] = Needs()
    tolerance: ClassVar[float] = 1e-5

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def params(self, in_features: int, out_features: int) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec((out_features, in_features), self.dtype, out=Axis(0), inp=Axis(1))}

    def finish(self, stored: Stored) -> Ready:
        return {"weight": stored["weight"].to(self.dtype).contiguous()}

    def apply(self, x: Tensor, ready: Ready, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, ready["weight"], bias)

    def weight_bytes(self, ready: Ready, rows: int) -> int:
        weight: Tensor = ready["weight"]
        return weight.nbytes

    def dequantize(self, stored: Stored) -> Tensor:
        return stored["weight"].float()

    def rows(self, ready: Ready, ids: Tensor) -> Tensor:
        return functional.embedding(ids, ready["weight"])

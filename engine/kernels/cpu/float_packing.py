"""Float weights in the layout of src/float_weight.h."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PANEL = 32  # output features stored together
FEATURE_STEP = 32
FLOAT_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """`data` is [panels, pairs, 2 * PANEL] in the weight's own type, contiguous and padded with zeros."""

    data: Tensor
    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        """Bytes of memory, padding included."""
        return self.data.nbytes

    @property
    def arguments(self) -> tuple[int, ...]:
        """The fields of the C struct."""
        return (self.data.data_ptr(), self.in_features, self.out_features, FLOAT_TYPES[self.data.dtype])


def pack_floats(weight: Tensor) -> FloatWeight:
    """`weight` [out, in] in float32, float16 or bfloat16, on the CPU."""
    if weight.dtype not in FLOAT_TYPES:
        raise ValueError(f"need one of {', '.join(map(str, FLOAT_TYPES))}, got {weight.dtype}")
    out_features, in_features = weight.shape
    padding = (0, -in_features % FEATURE_STEP, 0, -out_features % PANEL)
    padded = torch.nn.functional.pad(weight, padding) if any(padding) else weight
    panels = padded.view(-1, PANEL, padded.shape[1] // 2, 2)  # panel, output, pair, feature
    order = (0, 2, 1, 3) if weight.dtype is torch.bfloat16 else (0, 2, 3, 1)
    data = panels.permute(order).contiguous()
    return FloatWeight(data.view(*data.shape[:2], -1), in_features, out_features)

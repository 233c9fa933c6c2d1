"""The packed weights back in plain form, to compare with what was packed."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.cpu import float_packing
from engine.kernels.cpu.float_packing import FloatWeight
from engine.kernels.cpu.packing import GROUP, LANES, PANEL, PackedWeight


def unpack(w: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """(codes uint8 [out, in], d, m float32 [out, in / 32]): pack_codes backwards."""
    panels, groups, _ = w.data.shape
    code_bytes = PANEL * GROUP * w.bits // 8
    per_lane = 16 // w.bits
    lanes = w.data[..., :code_bytes].contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    lanes = lanes.view(panels, groups, -1, 2, LANES, 1, 2)  # chunk, half, output, (code), h
    shifts = torch.arange(per_lane, dtype=torch.int32).view(-1, 1) * w.bits
    split = (lanes >> shifts) & ((1 << w.bits) - 1)
    codes = split.permute(0, 3, 4, 1, 2, 5, 6).reshape(panels * PANEL, groups * GROUP).to(torch.uint8)
    dtype = torch.float16 if w.half else torch.float32
    scales = w.data[..., code_bytes:].contiguous().view(dtype).float().view(panels, groups, -1, PANEL)
    rows = scales.permute(2, 0, 3, 1).reshape(-1, panels * PANEL, groups)[:, : w.out_features]
    return codes[: w.out_features], rows[0], -w.center * rows[0] if w.center else rows[1]


def unpack_floats(w: FloatWeight) -> Tensor:
    """[out, in]: pack_floats backwards."""
    panels, pairs, _ = w.data.shape
    if w.data.dtype is torch.bfloat16:
        split = w.data.view(panels, pairs, float_packing.PANEL, 2).transpose(1, 2)
    else:
        split = w.data.view(panels, pairs, 2, float_packing.PANEL).permute(0, 3, 1, 2)
    return split.reshape(panels * float_packing.PANEL, pairs * 2)[: w.out_features, : w.in_features]

"""Weights in the layout of src/packed.h: y = x @ (d * codes + m)^T, d and m per 32 input features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
PANEL = 32  # output features stored together
LANES = 16
CENTERS = {4: 8, 8: 128}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """`data` is [panels, groups, bytes of a block] uint8, contiguous, the outputs padded to whole panels.

    `center` c > 0: m is exactly -c * d and not stored. 0: m is stored. `half`: d and m are float16, which
    happens only if that loses nothing.
    """

    data: Tensor
    in_features: int
    out_features: int
    bits: int
    half: bool
    center: int

    @property
    def nbytes(self) -> int:
        """Bytes of memory, padding included."""
        return self.data.nbytes

    @property
    def arguments(self) -> tuple[int, ...]:
        """The fields of the C struct."""
        _, groups, block_bytes = self.data.shape
        return (self.data.data_ptr(), block_bytes, groups, self.out_features, self.bits, self.half, self.center)


def pack_codes(codes: Tensor, d: Tensor, m: Tensor, bits: int) -> PackedWeight:
    """`codes` [out, in] uint8 below 2^bits, d and m [out, in / 32] float32. bits is 4 or 8."""
    if bits not in CENTERS:
        raise ValueError(f"bits must be 4 or 8, got {bits}")
    out_features, in_features = codes.shape
    groups = in_features // GROUP
    if in_features % GROUP or d.shape != (out_features, groups) or m.shape != d.shape:
        shapes = f"codes {tuple(codes.shape)}, d {tuple(d.shape)}, m {tuple(m.shape)}"
        raise ValueError(f"need codes [out, in], in a multiple of {GROUP}, d and m [out, in / {GROUP}]; got {shapes}")
    center = CENTERS[bits] if torch.equal(m, -CENTERS[bits] * d) else 0
    scales = [_pad(t).transpose(1, 2) for t in ((d,) if center else (d, m))]
    halves = [t.half() for t in scales]
    half = all(torch.equal(h.float(), t) for h, t in zip(halves, scales, strict=True))
    parts = [_pack_lanes(codes, bits), *(halves if half else scales)]
    data = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)
    return PackedWeight(data, in_features, out_features, bits, half, center)


def _pad(t: Tensor) -> Tensor:
    """Zero rows up to whole panels: [panels, PANEL, columns]."""
    padded = torch.nn.functional.pad(t, (0, 0, 0, -t.shape[0] % PANEL))
    return padded.view(-1, PANEL, t.shape[1])


def _pack_lanes(codes: Tensor, bits: int) -> Tensor:
    """[out, in] -> [panels, groups, PANEL * GROUP * bits / 16] int16."""
    per_lane = 16 // bits
    panels = _pad(codes)
    groups = codes.shape[1] // GROUP
    split = panels.view(panels.shape[0], 2, LANES, groups, -1, per_lane, 2)  # half, output, group, chunk, code, h
    split = split.permute(5, 0, 3, 4, 1, 2, 6).contiguous()
    lanes = split[0].to(torch.int16)
    for i in range(1, per_lane):
        lanes |= split[i].to(torch.int16) << (i * bits)
    return lanes.view(panels.shape[0], groups, -1)

"""The narrow formats of the cache, in torch: what every attention backend must read and write to the bit."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kv.storage import LARGEST, SCALE_DTYPE

__all__ = ["LARGEST", "decode", "encode"]

_BOUND = 2.0**127


def encode(x: Tensor, dtype: torch.dtype, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`x` [..., dim] -> codes [..., dim] of `dtype` and scales [...]; x is about codes * scales.

    `scales` None: they bring each head's largest magnitude to the largest code. Codes are rounded to the nearest, ties
    to even, and saturate. No code is NaN or infinite: NaN is taken for 0, and magnitudes above 2^127 for 2^127.
    """
    largest = LARGEST[dtype]
    wide = x.float().nan_to_num(0.0, _BOUND, -_BOUND).clamp(-_BOUND, _BOUND)
    if scales is None:
        scales = (wide.abs().amax(-1) / largest).to(SCALE_DTYPE)
    divisor = scales.float().unsqueeze(-1)
    codes = torch.where(divisor > 0, wide / divisor, 0.0).clamp(-largest, largest)
    return (codes.round() if dtype is torch.int8 else codes).to(dtype), scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """`codes` [..., dim] and scales [...] -> float32."""
    return codes.float() * scales.float().unsqueeze(-1)

"""Every op in plain torch: the oracle of the compiled kernels, and what runs where there are none."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from engine.select import Needs

GROUP = 32


class TorchKernels:
    """Any device, any float dtype; arithmetic in at least float32."""

    needs: ClassVar[Needs] = Needs()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Kernels.rms_norm()."""
        wide = _wide(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return ((wide * scale).to(weight.dtype) * weight).to(x.dtype)

    def rms_norm_add(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Kernels.rms_norm_add()."""
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """See Kernels.rope()."""
        half = cos.shape[1]
        c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, R/2]
        for x in (q, k):
            first, second = _wide(x[..., :half]), _wide(x[..., half : 2 * half])
            rotated = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
            x[..., : 2 * half] = rotated.to(x.dtype)

    def silu_mul(self, x: Tensor) -> Tensor:
        """See Kernels.silu_mul()."""
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def gelu_mul(self, x: Tensor) -> Tensor:
        """See Kernels.gelu_mul()."""
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.gelu(gate, approximate="tanh") * up

    def scale(self, x: Tensor, factor: float) -> None:
        """See Kernels.scale()."""
        x.mul_(factor)

    def softcap(self, x: Tensor, cap: float) -> None:
        """See Kernels.softcap()."""
        capped(x, cap)


def capped(x: Tensor, cap: float) -> Tensor:
    """`cap` * tanh(x / cap), in place."""
    return x.div_(cap).tanh_().mul_(cap)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dequantize(codes: Tensor, d: Tensor, m: Tensor) -> Tensor:
    """`d` * code + m per group of GROUP input features, in d's dtype.

    codes [out, in] uint8; d and m [out, in / GROUP]. Returns [out, in].
    """
    out_features, in_features = codes.shape
    grouped = codes.view(out_features, in_features // GROUP, GROUP).to(d.dtype)
    return torch.addcmul(m.unsqueeze(-1), grouped, d.unsqueeze(-1)).view(out_features, in_features)


def packed_linear(x: Tensor, codes: Tensor, d: Tensor, m: Tensor) -> Tensor:
    """`x` [T, in] @ dequantize(codes, d, m)^T in x's dtype."""
    return x @ dequantize(codes, d.to(x.dtype), m.to(x.dtype)).T

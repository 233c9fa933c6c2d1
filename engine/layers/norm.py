"""RMSNorm."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.base import Kernels


class RMSNorm:
    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        self._weight = weight
        self._eps = eps
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual). The caller gives up `residual`."""
        return self._kernels.rms_norm_add(x, residual, self._weight, self._eps)

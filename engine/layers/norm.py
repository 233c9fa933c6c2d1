"""Root mean square norm."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.base import Kernels


class RMSNorm:
    """Scales each row by the inverse of its root mean square, and by a weight. `eps` is added to the mean square."""

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        self._weight = weight
        self._eps = eps
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        """The normed rows, in the shape and type of `x`."""
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual). The caller gives up `residual`."""
        return self._kernels.rms_norm_add(x, residual, self._weight, self._eps)

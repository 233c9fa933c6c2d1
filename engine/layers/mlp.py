"""The gated feed-forward block."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.base import Kernels
from engine.layers.linear import ColumnLinear, RowLinear


class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gate_up: ColumnLinear, down: RowLinear, kernels: Kernels) -> None:
        self._gate_up = gate_up
        self._down = down
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._kernels.silu_mul(self._gate_up(x)))

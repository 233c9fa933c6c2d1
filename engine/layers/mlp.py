"""The gated feed-forward block."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from engine.kernels.base import Kernels
from engine.layers.linear import ColumnLinear, RowLinear


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(
        self, gate_up: ColumnLinear, down: RowLinear, kernels: Kernels, activation: Literal["silu", "gelu_tanh"]
    ) -> None:
        self._gate_up = gate_up
        self._down = down
        self._kernels = kernels
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """Rows `x` [T, hidden] -> [T, hidden]."""
        gated = self._kernels.silu_mul if self._activation == "silu" else self._kernels.gelu_mul
        return self._down(gated(self._gate_up(x)))

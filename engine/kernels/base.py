"""The small per-token ops of a decoder layer. To add a set: one file and one line in KERNELS."""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from engine.registry import Registry
from engine.select import Needs


class Kernels(Protocol):
    """Activations are [T, features] with unit stride on the last dim; rows may be strided views. Where heads
    are separate they are [T, H, D], dense within a row.
    Every row's result is independent of the other rows and of T; to the bit, if `needs` says invariant."""

    needs: ClassVar[Needs]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x` / rms(x) * weight over the last dim, as a new tensor in x's type. x may be [T, H, D]. The mean is taken
        in float32, and beside a float32 weight the product too."""

    def rms_norm_add(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual). The sum may be written into `residual`, which the
        caller gives up."""

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """Rotate q [T, H, D] and k [T, KVH, D] in place, neox style: feature i pairs with i + R/2, where
        R = 2 * cos.shape[1] <= D; features past R stay. cos and sin are [max_position, R/2] float32,
        positions [T] int64."""

    def silu_mul(self, x: Tensor) -> Tensor:
        """silu(x[:, :F]) * x[:, F:] for x [T, 2F], as a new [T, F] tensor."""

    def gelu_mul(self, x: Tensor) -> Tensor:
        """gelu(x[:, :F]) * x[:, F:] for x [T, 2F], as a new [T, F] tensor; gelu in its tanh approximation."""

    def scale(self, x: Tensor, factor: float) -> None:
        """Multiply x [T, F] in place."""

    def softcap(self, x: Tensor, cap: float) -> None:
        """`cap` * tanh(x / cap) in the place of x [T, F]."""


KERNELS: Registry[Kernels] = Registry(
    "kernel set",
    {
        "cpu_native": "engine.kernels.cpu.ops:NativeKernels",
        "torch": "engine.kernels.reference:TorchKernels",
        "torch_fixed": "engine.kernels.fixed:FixedKernels",
    },
)

"""The quantization seam: what a storage format of weights can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from engine.select import Needs


@dataclass(frozen=True, slots=True)
class Axis:
    """A tensor axis that follows features. `unit`: features packed in, or covered by, one element along dim."""

    dim: int
    unit: int = 1


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One stored tensor of a linear layer. Formats never mention ranks: parallel/sharding.py derives a rank's
    slice from the two axes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    out: Axis | None = None  # the axis that follows the output features
    inp: Axis | None = None  # the axis that follows the input features


Stored = Mapping[str, Tensor]
"""A weight as the checkpoint keeps it, or a rank's slice of it: one tensor per name in params()."""

Ready = Mapping[str, Any]
"""A weight as apply() and rows() want it: finish()'s result, opaque to everyone else."""


class QuantFormat(Protocol):
    """How a linear layer's weight is stored and multiplied. One instance per stored type and compute dtype.

    A weight has two lives. Stored: sliced, concatenated, dequantized. Ready: multiplied, looked up by row.
    """

    needs: ClassVar[Needs]
    tolerance: ClassVar[float]
    """Bound on |apply(x) - x @ dequantize.T| / max |output| when computing in float32."""

    def params(self, in_features: int, out_features: int) -> dict[str, ParamSpec]:
        """What is stored of such a layer, by name. Raises ModelFileError when the format cannot store it."""

    def finish(self, stored: Stored) -> Ready:
        """After loading and sharding: repack for the kernel. `stored` may be dropped afterwards."""

    def apply(self, x: Tensor, ready: Ready, bias: Tensor | None = None) -> Tensor:
        """`x` [T, in] @ weight.T + bias -> [T, out], in x's dtype."""

    def weight_bytes(self, ready: Ready, rows: int) -> int:
        """Bytes of the weight that apply() reads for x of `rows` rows."""

    def dequantize(self, stored: Stored) -> Tensor:
        """The weight, float32 [out, in]."""

    def rows(self, ready: Ready, ids: Tensor) -> Tensor:
        """Rows `ids` [T] of the weight in the compute dtype, [T, in]: embedding look-up."""


def fuse(specs: Mapping[str, ParamSpec], parts: Sequence[Stored]) -> dict[str, Tensor]:
    """Layers that share an input and a format, stacked along their output features (q, k, v; gate, up).

    `specs` is any part's params(). A tensor that has no output axis must be the same in every part.
    """
    return {
        name: parts[0][name] if spec.out is None else torch.cat([p[name] for p in parts], spec.out.dim)
        for name, spec in specs.items()
    }

"""A rank's slice of any stored tensor, from its ParamSpec alone. Pure."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from engine.errors import ConfigError
from engine.quant.base import ParamSpec

Split = Literal["column", "row", "none"]
"""column: by output features (each rank makes some outputs). row: by input features (partial sums)."""


def features(t: Tensor, spec: ParamSpec, split: Split, start: int, length: int) -> Tensor:
    """The part of t, a view, that serves features [start, start + length) of the split axis.

    A tensor without such an axis is whole on every rank. Raises ConfigError when the range cuts a unit.
    """
    axis = {"column": spec.out, "row": spec.inp, "none": None}[split]
    if axis is None:
        return t
    if start % axis.unit or length % axis.unit:
        raise ConfigError(
            f"tensor parallel {split} split: features {start} to {start + length} cut a quantization block; "
            f"they must be multiples of {axis.unit} (use fewer ranks)"
        )
    return t.narrow(axis.dim, start // axis.unit, length // axis.unit)


def rank_range(total: int, rank: int, size: int, what: str) -> tuple[int, int]:
    """(start, length) of a rank's even share. Raises ConfigError naming `what` when it does not divide."""
    if total % size:
        raise ConfigError(f"tensor_parallel_size {size} does not divide {what} ({total})")
    return rank * (total // size), total // size

"""Linear layers over any storage format, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.fixed import in_tiles
from engine.parallel.group import TPGroup
from engine.quant.base import QuantFormat, Ready


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some output features of a layer, stored in one format. `tile`: every product is of so many rows, see
    engine.kernels.fixed; None: of as many as there are."""

    format: QuantFormat
    ready: Ready
    bias: Tensor | None = None
    tile: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Rows `x` [T, in] -> [T, out] of this part."""
        if self.tile is not None:
            return in_tiles(self._apply, x, self.tile)
        return self._apply(x)

    def _apply(self, x: Tensor) -> Tensor:
        return self.format.apply(x, self.ready, self.bias)

    def weight_bytes(self, rows: int) -> int:
        """Bytes of weight that a call with `rows` rows reads."""
        return self.format.weight_bytes(self.ready, rows)


Join = Callable[[Sequence[Tensor]], Tensor]
"""Tensors [T, n_i] -> [T, sum of n_i]."""


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Join the parts along their last dimension."""
    return torch.cat(tuple(parts), dim=-1)


class ColumnLinear:
    """x [T, in] -> this rank's output features [T, out / ranks], in the order of the parts, put together by `join`."""

    def __init__(self, parts: Sequence[Part], join: Join = concatenate) -> None:
        self.parts = tuple(parts)
        self._join = join

    def __call__(self, x: Tensor) -> Tensor:
        """Rows `x` [T, in] -> [T, out / ranks]."""
        if len(self.parts) == 1:
            return self.parts[0](x)
        return self._join([part(x) for part in self.parts])


class RowLinear:
    """A rank's input features [T, in / ranks] -> every output feature, summed over the ranks."""

    def __init__(self, part: Part, group: TPGroup) -> None:
        self._part = part
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        """Rows `x` [T, in / ranks] -> [T, out], the same on every rank."""
        return self._group.all_reduce(self._part(x))

"""Torch's ops in calls of constant shape: what a row gets then does not depend on the rows beside it or on how many
there are, to the bit. Libraries choose how to sum by the shape of the whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from engine.kernels.reference import TorchKernels, capped
from engine.select import Needs

_SERIAL = 1 << 15  # elements: torch shares out larger ops among threads, and cuts rows in doing so
_ROWS = {"cpu": (16, 8, 4, 2, 1), "cuda": (64, 32, 16, 8, 4, 2, 1)}


def in_tiles(function: Callable[[Tensor], Tensor], x: Tensor, rows: int) -> Tensor:
    """function(x) of x [T, ...], row by row the same as ever, computed `rows` rows at a time. Every call gets memory
    of its own, which is aligned alike."""
    done = []
    for start in range(0, x.shape[0], rows):
        part = x[start : start + rows]
        tile = x.new_zeros(rows, *x.shape[1:])
        tile[: part.shape[0]] = part
        done.append(function(tile)[: part.shape[0]])
    return done[0] if len(done) == 1 else torch.cat(done)


def stable_rows(function: Callable[[Tensor], Tensor], features: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many rows a tile may have so that function gives a row the same bits wherever in the tile it stands: as many
    as this machine's libraries keep that up for. Tried with random rows; one row is always right."""
    generator = torch.Generator().manual_seed(0)
    for rows in _ROWS.get(device.type, (1,)):
        x = torch.randn(rows + 1, features, generator=generator).to(device, dtype)
        first, moved, turned = (function(t.clone()) for t in (x[:rows], x[1:], x[:rows].flip(0)))
        if torch.equal(first[1:], moved[:-1]) and torch.equal(first, turned.flip(0)):
            return rows
    return 1


class FixedKernels(TorchKernels):
    """Only sums and approximated functions need it: what is rounded once per element is the same in any shape."""

    needs: ClassVar[Needs] = Needs(invariant=True)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Kernels.rms_norm()."""
        whole = super().rms_norm
        return in_tiles(lambda tile: whole(tile, weight, eps), x, _rows_of(x))

    def silu_mul(self, x: Tensor) -> Tensor:
        """See Kernels.silu_mul()."""
        return in_tiles(super().silu_mul, x, _rows_of(x))

    def gelu_mul(self, x: Tensor) -> Tensor:
        """See Kernels.gelu_mul()."""
        return in_tiles(super().gelu_mul, x, _rows_of(x))

    def softcap(self, x: Tensor, cap: float) -> None:
        """See Kernels.softcap()."""
        x.copy_(in_tiles(partial(capped, cap=cap), x, _rows_of(x)))


def _rows_of(x: Tensor) -> int:
    return max(1, min(64, _SERIAL // x[0].numel()))

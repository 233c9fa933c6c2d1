"""The ranks that share one model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TPGroup(Protocol):
    """Passed to layers; never a module global. Every rank calls the same methods in the same order.

    SoloGroup is the only one yet; a group over several ranks needs an executor that starts them.
    """

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x. May write into x: use only what is returned."""

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's x, in rank order, concatenated along dim. All ranks pass the same shape."""

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Rank src's x. The others pass a tensor of the same shape and dtype, which may be overwritten."""


class SoloGroup:
    """One rank: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """See TPGroup.all_reduce()."""
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """See TPGroup.all_gather()."""
        return x

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """See TPGroup.broadcast()."""
        return x

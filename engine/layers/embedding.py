"""Token ids to vectors, and vectors to logits."""

from __future__ import annotations

from torch import Tensor

from engine.layers.linear import Part
from engine.parallel.group import TPGroup
from engine.quant.base import QuantFormat, Ready


class Embedding:
    """ids [T] -> [T, hidden]. The table is whole on every rank."""

    def __init__(self, format: QuantFormat, ready: Ready) -> None:
        self._format = format
        self._ready = ready

    def __call__(self, ids: Tensor) -> Tensor:
        """Token ids [T] -> vectors [T, hidden]."""
        return self._format.rows(self._ready, ids)


class Head:
    """hidden [R, H] -> logits [R, vocab] float32. `split`: each rank holds an equal share of the vocabulary."""

    def __init__(self, part: Part, group: TPGroup, split: bool) -> None:
        self._part = part
        self._group = group
        self._split = split

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] -> logits [R, vocab], float32, the same on every rank."""
        logits = self._part(hidden)
        return (self._group.all_gather(logits) if self._split else logits).float()

"""The linear layers of a step, taken out of the model to run alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.layers.linear import Part
from load_tests.engine_bench.patch import Method, replaced
from load_tests.engine_bench.subject import Subject, decodes
from load_tests.errors import LoadError


@dataclass(frozen=True, slots=True)
class Linears:
    """What one decode step of a batch multiplies, in order, each layer with an input as it got it."""

    calls: tuple[tuple[Part, Tensor], ...]

    @torch.inference_mode()
    def __call__(self) -> None:
        for part, x in self.calls:
            part(x)

    @property
    def weight_bytes(self) -> int:
        return sum(part.weight_bytes(x.shape[0]) for part, x in self.calls)


def linears_of(subject: Subject, batch: int) -> Linears:
    """Seen by watching one step. Raises LoadError for a model without linear layers as this package knows them."""
    calls: list[tuple[Part, Tensor]] = []

    def watch(method: Method, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(part: Part, x: Tensor) -> Any:
            calls.append((part, x.clone()))
            return original(part, x)

        return call

    with replaced([(Part, "__call__")], watch):
        subject.forward(decodes(batch))
    if not calls:
        raise LoadError("this model calls no engine.layers.linear.Part")
    return Linears(tuple(calls))

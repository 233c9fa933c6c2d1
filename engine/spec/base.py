"""The seam of speculative decoding: a proposer drafts tokens, and the rank accepts or refuses them.

No method is built in yet, nor what accepts. The scheduler already plans drafts and drops refused ones, and its tests
run with a fake method, so that a real one changes nothing there.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.registry import Registry


@dataclass(frozen=True, slots=True)
class DraftInput:
    """A sequence to draft for, and all of its tokens."""

    seq_id: int
    tokens: Seq[int]


@dataclass(frozen=True, slots=True)
class Draft:
    """`probs` [k, vocab] is the distribution each token was drawn from; None: a deterministic proposal."""

    tokens: tuple[int, ...]
    probs: Tensor | None = None


class Proposer(Protocol):
    """A draft method. It may remember sequences until forget()."""

    def propose(self, inputs: Seq[DraftInput], k: int) -> list[Draft]:
        """Draft at most `k` tokens to follow each input; may be fewer, or none."""

    def forget(self, seq_ids: Seq[int]) -> None:
        """These sequences have ended."""


PROPOSERS: Registry[Proposer] = Registry("speculative method", {"none": "engine.spec.none:NoProposer"})

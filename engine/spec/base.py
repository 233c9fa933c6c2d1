"""The speculation seam: a proposer guesses, spec/verify.py (shared by all) decides."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.registry import Registry


@dataclass(frozen=True, slots=True)
class DraftInput:
    seq_id: int
    tokens: Seq[int]


@dataclass(frozen=True, slots=True)
class Draft:
    """`probs` [k, vocab] is the distribution each token was drawn from; None: a deterministic proposal."""

    tokens: tuple[int, ...]
    probs: Tensor | None = None


class Proposer(Protocol):
    def propose(self, inputs: Seq[DraftInput], k: int) -> list[Draft]:
        """At most k tokens to follow each input. May be shorter, or empty."""

    def forget(self, seq_ids: Seq[int]) -> None: ...


PROPOSERS: Registry[Proposer] = Registry("speculative method", {"none": "engine.spec.none:NoProposer"})

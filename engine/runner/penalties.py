"""Edits of logits that depend on what a sequence has said: bans, biases and the three penalties.

Each edit touches a few tokens of a few rows, so it works on flat indices into logits [R, vocab] instead of a
dense tensor per edit. Logits must be contiguous; they are changed in place.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.types import SamplingParams

Ids = npt.NDArray[np.int64]
_MAX = float(np.finfo(np.float32).max)
_FACTORS = (1e-30, 1e30)  # float32 holds neither much less nor much more: infinity times 0 is NaN


def valid_ids(ids: Seq[int] | frozenset[int], vocab_size: int) -> Ids:
    """Sorted and distinct. Ids outside the vocabulary can never be generated and are left out."""
    return np.array(sorted({i for i in ids if 0 <= i < vocab_size}), np.int64)


class TokenHistory:
    """Which tokens a sequence has seen: distinct ids, and how often each is in the output.

    `prompt` is given only if the prompt counts (repetition penalty); its tokens then have count 0 until they
    are generated. Rewinding is rare (a step run again) and costs a rebuild.
    """

    def __init__(self, prompt: Seq[int], vocab_size: int) -> None:
        self._prompt = valid_ids(prompt, vocab_size)
        self.output: list[int] = []
        self._reset()

    def _reset(self) -> None:
        size = len(self._prompt)
        self._slots = {int(t): i for i, t in enumerate(self._prompt)}
        self._ids = np.concatenate([self._prompt, np.zeros(64, np.int64)])
        self._counts = np.zeros(size + 64, np.int64)

    @property
    def ids(self) -> Ids:
        """The distinct tokens that occurred, in order of first occurrence."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Ids:
        """Occurrences in the output, aligned with ids."""
        return self._counts[: len(self._slots)]

    def append(self, token: int) -> None:
        """Count one more output token."""
        self.output.append(token)
        self._count(token)

    def rewind(self, num_output: int) -> None:
        """Forget all but the first num_output output tokens."""
        if num_output < len(self.output):
            del self.output[num_output:]
            self._reset()
            for token in self.output:
                self._count(token)

    def _count(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1


@dataclass(frozen=True, slots=True)
class Penalised:
    """A row of the logits to penalise by its sequence's history."""

    row: int
    params: SamplingParams
    history: TokenHistory


def has_penalties(params: SamplingParams) -> bool:
    """Whether logits depend on the tokens so far."""
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def add_bias(logits: Tensor, rows: Seq[tuple[int, Ids, npt.NDArray[np.float32]]]) -> None:
    """Add each row's values to its ids (distinct within a row)."""
    where = _flat(logits, [(row, ids) for row, ids, _ in rows])
    values = torch.from_numpy(np.concatenate([v for _, _, v in rows])).to(logits.device)
    logits.view(-1).index_add_(0, where, values)


def ban(logits: Tensor, rows: Seq[tuple[int, Ids]]) -> None:
    """Make each row's ids impossible to draw."""
    logits.view(-1).index_fill_(0, _flat(logits, rows), -torch.inf)


def penalise(logits: Tensor, rows: Seq[Penalised]) -> None:
    """Repetition (prompt and output: a positive logit is divided, another multiplied), then frequency (per
    occurrence in the output) and presence (once for any)."""
    sizes = [len(r.history.ids) for r in rows]
    counts = np.concatenate([r.history.counts for r in rows])
    factors = np.clip([r.params.repetition_penalty for r in rows], *_FACTORS).astype(np.float32)
    repetition = np.repeat(factors, sizes)
    frequency = np.repeat(np.array([r.params.frequency_penalty for r in rows]), sizes)
    presence = np.repeat(np.array([r.params.presence_penalty for r in rows]), sizes)
    penalty = (frequency * counts + presence * (counts > 0)).astype(np.float32)

    where = _flat(logits, [(r.row, r.history.ids) for r in rows])
    factor = torch.from_numpy(repetition).to(logits.device)
    x = logits.view(-1).index_select(0, where)
    x = torch.where(x > 0, x / factor, x * factor) - torch.from_numpy(penalty).to(logits.device)
    # A tiny repetition penalty may overflow; an infinite logit would turn into NaN in the softmax.
    logits.view(-1).index_copy_(0, where, x.clamp_(max=_MAX))


def _flat(logits: Tensor, rows: Seq[tuple[int, Ids]]) -> Tensor:
    vocab = logits.shape[1]
    return torch.from_numpy(np.concatenate([ids + row * vocab for row, ids in rows])).to(logits.device)

"""What the ranks know of sequences."""

from __future__ import annotations

from collections.abc import Set

from engine.scheduler.plan_builder import PlanBuilder
from engine.types import NewSequence, Sequence


class KnownSequences:
    """The live sequences that a plan has announced to the ranks, and those that ended since the last plan.

    `eos_ids`: what ends a sequence besides its own stop tokens.
    """

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids
        self._announced: set[int] = set()
        self._ended: list[int] = []
        self._held_back = False  # one that runs was not in the last plan, and is perhaps not announced

    def announce(self, step: PlanBuilder) -> tuple[NewSequence, ...]:
        """What the ranks must be told of the sequences that this step's plan has tokens of."""
        if not (step.prompts or self._held_back):  # as in most steps: decodes alone
            return ()
        new = [seq for seq in step.grants if seq.seq_id not in self._announced]
        self._announced.update(seq.seq_id for seq in new)
        self._held_back = any(seq not in step.grants for seq in step.prompts)
        return tuple(self._announcement(seq) for seq in new)

    def end(self, seq_id: int) -> None:
        """A sequence has ended."""
        if seq_id in self._announced:
            self._announced.remove(seq_id)
            self._ended.append(seq_id)

    def take_ended(self) -> tuple[int, ...]:
        """Those that the ranks can forget, each once."""
        ended = tuple(self._ended)
        self._ended.clear()
        return ended

    def check(self, live: Set[int]) -> None:
        """Assert that live sequences alone are announced. For tests."""
        assert self._announced <= live and not self._announced & set(self._ended)

    def _announcement(self, seq: Sequence) -> NewSequence:
        sampling, tokens = seq.request.sampling, tuple(seq.tokens)
        end_ids = self._eos_ids | sampling.stop_token_ids if sampling.min_tokens > 0 else frozenset[int]()
        return NewSequence(seq.seq_id, sampling, seq.seed, tokens[: seq.num_prompt], tokens[seq.num_prompt :], end_ids)

"""No speculation."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.spec.base import Draft, DraftInput


class NoProposer:
    """Proposes nothing, remembers nothing."""

    def propose(self, inputs: Seq[DraftInput], k: int) -> list[Draft]:
        """No drafts for any input."""
        return [Draft(()) for _ in inputs]

    def forget(self, seq_ids: Seq[int]) -> None:
        """There is nothing to forget."""
        return

"""The plan of a step while it is being made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from engine.types import SeqSlice, Sequence


@dataclass(slots=True)
class PlanBuilder:
    """Tokens granted to each sequence, in plan order, and the token budget that is left. A grant can be taken back.

    `prompts` are the running sequences that lack more than one token or were admitted in this step, `admitted` the
    latter; `prompt_tokens` is what all of them lack. `num_prompts` counts also the waiting ones that the running limit
    has room for. `prefill_budgets`: see ChunkPlanner.budget(), by class. After a preemption only sequences of a class
    below `admit_below` may be admitted.
    """

    budget: int
    now_s: float
    grants: dict[Sequence, int] = field(default_factory=dict)
    decodes: list[Sequence] = field(default_factory=list)
    prompts: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    prompt_tokens: int = 0
    num_prompts: int = 0
    prefill_budgets: dict[int, int] = field(default_factory=dict)
    admit_below: float = inf

    def grant(self, seq: Sequence, num_tokens: int) -> None:
        """The sequence computes so many tokens in this step."""
        self.grants[seq] = num_tokens
        self.budget -= num_tokens

    def add_prompt(self, seq: Sequence) -> None:
        """The sequence lacks more than one token, or is admitted now."""
        self.prompts.append(seq)
        self.prompt_tokens += seq.num_pending

    def take_back(self, seq: Sequence) -> None:
        """The sequence does not run in this step after all."""
        self.budget += self.grants.pop(seq, 0)
        self.prefill_budgets.clear()
        if seq in self.decodes:
            self.decodes.remove(seq)
        if seq in self.prompts:
            self.prompts.remove(seq)
            self.prompt_tokens -= seq.num_pending


def slices(grants: Iterable[tuple[Sequence, int]], block_size: int) -> tuple[SeqSlice, ...]:
    """What the ranks are told. `table` is made once per change of blocks: most decodes change none."""
    made = []
    for seq, num_tokens in grants:
        start, tokens, drafts = seq.num_computed, seq.tokens, seq.drafts
        end = start + num_tokens
        table = seq.table
        if table is None:
            table = seq.table = tuple(seq.blocks)
        num_blocks = -(-end // block_size)
        if num_blocks != len(table):
            table = table[:num_blocks]
        own = (tokens[start],) if num_tokens == 1 else (*tokens[start:end], *drafts)
        sample = end >= len(tokens) and seq.max_len > seq.num_prompt
        made.append(SeqSlice(seq.seq_id, own, start, table, sample, len(drafts)))
    return tuple(made)

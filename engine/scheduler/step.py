"""A plan in the making."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from engine.types import SeqSlice, Sequence


@dataclass(slots=True)
class Step:
    """Tokens granted, in plan order, and budget left. A grant can be taken back. `prompts` are the running
    sequences that lack more than one token or were seated in this step, `fresh` the latter; `lacking`: the tokens
    of all of them. `num_prompts` counts also those that wait and have a seat to go to. `rooms`: see Chunks. After
    preemption only sequences of a class below `barrier` may be seated.
    """

    budget: int
    now_s: float
    grants: dict[Sequence, int] = field(default_factory=dict)
    decodes: list[Sequence] = field(default_factory=list)
    prompts: list[Sequence] = field(default_factory=list)
    fresh: list[Sequence] = field(default_factory=list)
    lacking: int = 0
    num_prompts: int = 0
    rooms: dict[int, int] = field(default_factory=dict)
    barrier: float = inf

    def grant(self, seq: Sequence, num_tokens: int) -> None:
        self.grants[seq] = num_tokens
        self.budget -= num_tokens

    def add_prompt(self, seq: Sequence) -> None:
        self.prompts.append(seq)
        self.lacking += seq.num_pending

    def take_back(self, seq: Sequence) -> None:
        self.budget += self.grants.pop(seq, 0)
        self.rooms.clear()
        if seq in self.decodes:
            self.decodes.remove(seq)
        if seq in self.prompts:
            self.prompts.remove(seq)
            self.lacking -= seq.num_pending


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

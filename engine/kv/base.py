"""What the scheduler asks of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.kv.host import Copies
from engine.types import Sequence

GONE = -1
"""Stands in a sequence's blocks, and so in block tables, where a block was: behind the window, never read again."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first `num_tokens` tokens are in the cache: in `block_ids`, and after those in `slots` of host memory, GONE
    standing for what no later token sees. Valid until the cache is next changed."""

    block_ids: tuple[int, ...]
    num_tokens: int
    slots: tuple[int, ...] = ()


class KVCache(Protocol):
    """Block accounting only: knows no tensors, no devices. Owns `blocks` and `table` of every Sequence it is given;
    sets `num_computed` when K/V is found (reserve with a hit) or lost (release, swap_out), and `num_cached`."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    def num_blocks(self) -> int:
        """Blocks on the device, used or free."""

    @property
    def num_used(self) -> int:
        """Blocks that live sequences hold, a shared one counted once."""

    @property
    def num_free(self) -> int:
        """Blocks that reserve() could give out; what they still hold may be shared until then."""

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether one sequence of num_tokens fits the empty cache."""

    def lookup(self, seq: Sequence) -> PrefixHit:
        """What a sequence without blocks need not compute: all that swap_out() kept, or else the longest shareable
        prefix in whole blocks, never all tokens: the last one's logits are needed. Nothing is shareable for a
        request with prompt_logprobs, which needs every row's."""

    def reserve(self, seq: Sequence, num_tokens: int, hit: PrefixHit | None = None, spare: int = 0) -> bool:
        """Grow seq.blocks to hold num_tokens more than are computed, leaving `spare` blocks free if it grows.

        A `hit`, for a sequence without blocks only, is taken over and becomes num_computed. Where there is a window
        blocks that no later token sees are first let go, and with a hit none are taken that are of no use yet: see
        extend(). False: no room, nothing else changed.
        """

    def extend(self, seq: Sequence, num_tokens: int) -> int:
        """How many of the next num_tokens its blocks hold, having grown where possible. All, without a window."""

    def held(self, seq: Sequence) -> int:
        """Blocks that seq holds."""

    def demand(self, seq: Sequence, hit: PrefixHit) -> int:
        """Free blocks that reserving all tokens of seq with this hit would take."""

    def loading(self, seq: Sequence) -> bool:
        """Whether blocks of seq get their content with the next plan, so that it cannot run in that plan."""

    def freeable(self, seq: Sequence) -> int:
        """Blocks that would be free if seq alone let go of its own."""

    def commit(self, seq: Sequence) -> None:
        """Publish the blocks that computed tokens have filled, so that others may share them."""

    def release(self, seq: Sequence) -> None:
        """Let go of all blocks; num_computed becomes 0."""

    def swap_out(self, seq: Sequence) -> bool:
        """Release, but keep what is computed in host memory until the next reserve() or forget(). False: no room
        there, nothing changed."""

    def discard(self, seq: Sequence) -> None:
        """Take the blocks that only this sequence holds out of the prefix cache: their content is of no use."""

    def forget(self, seq: Sequence) -> None:
        """Release, and drop whatever else is remembered of a sequence that has ended."""

    def take_copies(self) -> Copies:
        """The copies that the next plan must carry."""

    def check(self) -> None:
        """Assert that every block is free, cached or owned exactly as counted. For tests: O(pool)."""

"""Which blocks of a sequence a model with sliding windows still reads."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVWindow:
    """A token sees the last `size` tokens, itself included, in the layer that sees most, and everywhere the first
    `sinks`. A step computes at most `ahead` tokens of a sequence."""

    size: int
    sinks: int = 0
    ahead: int = 1

    def gone(self, num_computed: int, block_size: int) -> range:
        """The blocks that no token after the first num_computed sees."""
        first = -(-self.sinks // block_size)
        return range(first, max(first, (num_computed - self.size + 1) // block_size))

    def least_blocks(self, block_size: int) -> int:
        """Blocks that a sequence of any length needs at once when it goes on token by token."""
        return -(-self.sinks // block_size) - (-(self.size - 1) // block_size) + 1

    def most_blocks(self, block_size: int) -> int:
        """Blocks that a sequence of any length can use at once in the longest steps."""
        return -(-self.sinks // block_size) - (-(self.size - 1 + self.ahead) // block_size) + 2


def widest(layer_windows: Seq[int | None]) -> int | None:
    """The window of the layer that sees most; None if that sees all: one block table serves all layers, so that only
    what no layer reads can go."""
    sizes = [size for size in layer_windows if size is not None]
    return max(sizes) if sizes and len(sizes) == len(layer_windows) else None

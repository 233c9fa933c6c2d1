"""Prefixes that move between engines: what one has computed, another need not.

Blocks travel under their digests, which name model, dtype, salt and tokens: an engine with another model would never
look for them, and no tenant finds another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from engine.kv.manager import PagedKVCache

if TYPE_CHECKING:
    from torch import Tensor

Layers = tuple[tuple["Tensor", ...], ...]
"""Per layer its tensors, K and V first, each [num_blocks, block_size, num_kv_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """The first blocks of a sequence, in order. The tensors are the receiver's: nobody else writes them."""

    digests: tuple[bytes, ...]
    layers: Layers


@runtime_checkable
class BlockAccess(Protocol):
    """An executor that lets its cache be read and written, between steps."""

    def read_blocks(self, block_ids: Sequence[int]) -> Layers:
        """Copies of the blocks: per layer its tensors, each [len(block_ids), ...]."""

    def write_blocks(self, block_ids: Sequence[int], layers: Layers) -> None:
        """Overwrite blocks. Raises ConfigError for tensors of another shape or dtype than the cache's."""


class KVTransfer(Protocol):
    """One engine's side of moving prefixes to another. Called from the thread that steps the engine, between steps.

    The graph does not call it yet; it is the seam for prefill and decode on different replicas.
    """

    def export_prefix(self, token_ids: Sequence[int], salt: str = "") -> KVBlocks:
        """As many whole blocks of token_ids, from the first on, as are on the device."""

    def import_prefix(self, blocks: KVBlocks) -> int:
        """Put blocks into the cache, as if they had been computed here and let go. Returns how many were new and
        found room. The first request to use them does not report their tokens as cached."""


class LocalTransfer:
    """KVTransfer over an engine in this process."""

    def __init__(self, kv: PagedKVCache, access: BlockAccess) -> None:
        self._kv = kv
        self._access = access

    def export_prefix(self, token_ids: Sequence[int], salt: str = "") -> KVBlocks:
        """See KVTransfer.export_prefix()."""
        digests = self._kv.digests(token_ids, salt)
        blocks = self._kv.find(digests)
        return KVBlocks(tuple(digests[: len(blocks)]), self._access.read_blocks(blocks))

    def import_prefix(self, blocks: KVBlocks) -> int:
        """See KVTransfer.import_prefix()."""
        fresh = self._kv.adopt(blocks.digests)
        if fresh:
            rows = [index for index, _ in fresh]
            own = tuple(tuple(tensor[rows] for tensor in layer) for layer in blocks.layers)
            self._access.write_blocks([block for _, block in fresh], own)
        return len(fresh)

"""Remembers which replicas are believed to hold which prefixes, by the digests that their own caches use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from deployments.channel.prefix_news import KEY_BYTES
from engine.kv.prefix import block_digests, root_digest

BLOCK = 16  # tokens, unless an engine is configured otherwise
_MAX_BLOCKS = 1024  # of one prompt: longer ones are compared by their beginnings

Chain = Sequence[bytes]


def chain(
    root_fields: Mapping[str, str], salt: str, token_ids: Sequence[int], block_tokens: int = BLOCK
) -> Iterator[bytes]:
    """Yields the keys of a prompt's full blocks, as a replica with these root fields has them.

    The last token is left out, since the engine always computes it.
    """
    root = root_digest({**root_fields, "salt": salt})
    blocks = max(0, min((len(token_ids) - 1) // block_tokens, _MAX_BLOCKS))
    for digest in block_digests(root, token_ids[: blocks * block_tokens], block_tokens):
        yield digest[:KEY_BYTES]


class PrefixIndex:
    """Per replica the keys it is believed to hold, least recently used first, at most `max_blocks` of them.

    Belief comes from what was sent there, which will be cached in a moment, and from what replicas report. Each key
    has a set of replicas as the bits of one integer, so that a lookup costs the length of the chain, not times the
    number of replicas.
    """

    def __init__(self, max_blocks: int, block_tokens: int = BLOCK) -> None:
        self._max_blocks = max_blocks
        self.block_tokens = block_tokens
        self._bits: dict[str, int] = {}  # replica id -> its bit
        self._names: dict[int, str] = {}  # and back
        self._held: dict[str, OrderedDict[bytes, None]] = {}
        self._holders: dict[bytes, int] = {}

    def __len__(self) -> int:
        """The number of different keys that replicas hold."""
        return len(self._holders)

    def num_held(self, replica_id: str) -> int:
        """How many blocks the replica is believed to hold."""
        return len(self._held.get(replica_id, ()))

    def cached_tokens(self, keys: Chain) -> dict[str, int]:
        """For each replica that holds the first block: how many tokens from the beginning on it holds."""
        if not keys or not (alive := self._holders.get(keys[0], 0)):
            return {}
        depths: list[tuple[int, int]] = []  # (bits that end here, blocks)
        depth = 1
        for key in keys[1:]:
            still = alive & self._holders.get(key, 0)
            if still != alive:
                depths.append((alive ^ still, depth))
                if not still:
                    break
                alive = still
            depth += 1
        else:
            depths.append((alive, depth))
        cached: dict[str, int] = {}
        for bits, blocks in depths:
            while bits:
                bit = bits & -bits
                bits ^= bit
                cached[self._names[bit]] = blocks * self.block_tokens
        return cached

    def add(self, replica_id: str, keys: Iterable[bytes]) -> None:
        """Notes that the replica holds these blocks, or soon will.

        `keys` of one prompt must be in order, so that its last blocks are forgotten first.
        """
        held = self._held.get(replica_id)
        if held is None:
            held = self._held[replica_id] = OrderedDict()
            bit = self._bits[replica_id] = _free_bit(self._names)
            self._names[bit] = replica_id
        bit, holders = self._bits[replica_id], self._holders
        for key in reversed(list(keys)):
            if key in held:
                held.move_to_end(key)
            else:
                held[key] = None
                holders[key] = holders.get(key, 0) | bit
        while len(held) > self._max_blocks:
            self._clear(held.popitem(last=False)[0], bit)

    def remove(self, replica_id: str, keys: Iterable[bytes]) -> None:
        """Notes that the replica no longer holds these blocks."""
        held = self._held.get(replica_id)
        if held is None:
            return
        for key in keys:
            if key in held:
                del held[key]
                self._clear(key, self._bits[replica_id])

    def forget(self, replica_id: str) -> None:
        """Forgets a replica that is gone or has lost its cache."""
        self.remove(replica_id, list(self._held.get(replica_id, ())))
        self._held.pop(replica_id, None)
        self._names.pop(self._bits.pop(replica_id, 0), None)

    def _clear(self, key: bytes, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]


def _free_bit(taken: Iterable[int]) -> int:
    used = sum(taken)
    bit = 1
    while used & bit:
        bit <<= 1
    return bit

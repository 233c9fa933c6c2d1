"""Which blocks a sequence holds, and which it can share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine.kv.pool import BlockPool
from engine.kv.prefix import block_digest, root_digest
from engine.types import Sequence


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks that already hold the first `num_tokens` tokens. Valid until the cache is next changed."""

    block_ids: tuple[int, ...]
    num_tokens: int


class KVCache(Protocol):
    """Block accounting only: knows no tensors, no devices. Owns `blocks` of every Sequence it is given and
    sets `num_computed` when K/V is found (reserve with a hit) or lost (release)."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_used(self) -> int:
        """Blocks that live sequences hold, a shared one counted once."""

    @property
    def prefix_queries(self) -> int:
        """Tokens of sequences admitted for the first time while their prefix could have been cached."""

    @property
    def prefix_hits(self) -> int:
        """Those of prefix_queries that were found. A preempted sequence finding its own blocks counts in neither."""

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether one sequence of num_tokens fits the empty cache."""

    def lookup(self, seq: Sequence) -> PrefixHit:
        """The longest shareable prefix in whole blocks, never all tokens: the last one's logits are needed.
        Empty for a request with prompt_logprobs, which needs every row's."""

    def reserve(self, seq: Sequence, num_tokens: int, hit: PrefixHit | None = None, spare: int = 0) -> bool:
        """Grow seq.blocks to hold num_tokens more than are computed, leaving `spare` blocks free if it grows.

        A `hit`, for a sequence without blocks only, is taken over and becomes num_computed. False: no room,
        nothing changed.
        """

    def commit(self, seq: Sequence) -> None:
        """Publish the blocks that computed tokens have filled, so that others may share them."""

    def release(self, seq: Sequence) -> None:
        """Let go of all blocks; num_computed becomes 0."""

    def forget(self, seq: Sequence) -> None:
        """Release, and drop whatever else is remembered of a sequence that has ended."""

    def check(self) -> None:
        """Assert that every block is free, cached or owned exactly as counted. For tests: O(pool)."""


@dataclass(slots=True)
class _Record:
    """What the cache remembers of a sequence. `chain[i]` names tokens up to the end of block i; it outlives
    preemption because tokens only grow. The first `num_committed` of its blocks are settled."""

    root: bytes
    chain: list[bytes] = field(default_factory=list)
    num_committed: int = 0


class PagedKVCache:
    """KVCache over one BlockPool. `root_fields` names all that shapes K/V besides tokens and the request's
    salt: model content version, adapter, K/V dtype, ..."""

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool, root_fields: Mapping[str, str]
    ) -> None:
        self.block_size = block_size
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._pool = BlockPool(num_blocks)
        self._caching = enable_prefix_caching
        self._root_fields = dict(root_fields)
        assert "salt" not in self._root_fields, "the salt comes from each request"
        self._records: dict[int, _Record] = {}
        self._owners: dict[int, Sequence] = {}

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_used(self) -> int:
        return self._pool.num_blocks - self._pool.num_free

    def can_ever_fit(self, num_tokens: int) -> bool:
        return num_tokens <= self._pool.num_blocks * self.block_size

    def lookup(self, seq: Sequence) -> PrefixHit:
        if not self._shareable(seq):
            return PrefixHit((), 0)
        blocks: list[int] = []
        for digest in self._chain(seq, (len(seq.tokens) - 1) // self.block_size):
            block = self._pool.find(digest)
            if block is None:
                break
            blocks.append(block)
        return PrefixHit(tuple(blocks), len(blocks) * self.block_size)

    def reserve(self, seq: Sequence, num_tokens: int, hit: PrefixHit | None = None, spare: int = 0) -> bool:
        pool, computed = self._pool, seq.num_computed
        shared: tuple[int, ...] = ()
        if hit is not None:
            assert not seq.blocks, "only a sequence without blocks can take a prefix over"
            shared, computed = hit.block_ids, hit.num_tokens
        grow = -(-(computed + num_tokens) // self.block_size) - len(seq.blocks) - len(shared)
        if grow <= 0 and hit is None:
            return True  # most decodes
        if pool.num_free < grow + spare + sum(pool.refs(block) == 0 for block in shared):
            return False
        if hit is not None:
            self._take_over(seq, hit)  # before any acquire(), which might evict the hit
        for _ in range(grow):
            seq.blocks.append(pool.acquire())
        self._owners[seq.seq_id] = seq
        return True

    def _take_over(self, seq: Sequence, hit: PrefixHit) -> None:
        if self._shareable(seq) and not seq.admitted_before:
            self.prefix_queries += len(seq.tokens)
            self.prefix_hits += hit.num_tokens
        for block in hit.block_ids:
            self._pool.touch(block)
        seq.blocks.extend(hit.block_ids)
        seq.num_computed = hit.num_tokens
        if hit.block_ids:
            self._record(seq).num_committed = len(hit.block_ids)

    def commit(self, seq: Sequence) -> None:
        full = seq.num_computed // self.block_size
        if not self._caching or full == 0:
            return
        record = self._record(seq)
        if full == record.num_committed:
            return
        chain = self._chain(seq, full)
        for i in range(record.num_committed, full):
            self._pool.publish(seq.blocks[i], chain[i])
        record.num_committed = full

    def release(self, seq: Sequence) -> None:
        for block in reversed(seq.blocks):  # a prefix without its tail is of use, a tail without its head is not
            self._pool.free(block)
        seq.blocks.clear()
        seq.num_computed = 0
        self._owners.pop(seq.seq_id, None)
        if record := self._records.get(seq.seq_id):
            record.num_committed = 0

    def forget(self, seq: Sequence) -> None:
        self.release(seq)
        self._records.pop(seq.seq_id, None)

    def check(self) -> None:
        self._pool.check()
        held = Counter(block for seq in self._owners.values() for block in seq.blocks)
        for block in range(self._pool.num_blocks):
            assert held[block] == self._pool.refs(block), f"block {block}: {held[block]} owners, refs differ"
        for seq in self._owners.values():
            assert len(set(seq.blocks)) == len(seq.blocks), f"sequence {seq.seq_id} holds a block twice"
            assert seq.num_computed <= len(seq.blocks) * self.block_size, f"sequence {seq.seq_id} lacks blocks"

    def _shareable(self, seq: Sequence) -> bool:
        return self._caching and seq.request.sampling.prompt_logprobs is None

    def _record(self, seq: Sequence) -> _Record:
        record = self._records.get(seq.seq_id)
        if record is None:
            root = root_digest({**self._root_fields, "salt": seq.request.cache_salt})
            record = self._records[seq.seq_id] = _Record(root)
        return record

    def _chain(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """Digests of the first num_blocks blocks of seq.tokens, each computed once in the sequence's life."""
        record = self._record(seq)
        chain, size = record.chain, self.block_size
        for i in range(len(chain), num_blocks):
            chain.append(block_digest(chain[-1] if chain else record.root, seq.tokens[i * size : (i + 1) * size]))
        return chain[:num_blocks]

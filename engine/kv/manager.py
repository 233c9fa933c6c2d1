"""Which blocks a sequence holds, which it can share, and what becomes of those it lets go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.kv.base import GONE, PrefixHit
from engine.kv.host import Copies, HostTier
from engine.kv.pool import BlockPool
from engine.kv.prefix import block_digest, root_digest
from engine.kv.window import KVWindow
from engine.types import Sequence


@dataclass(slots=True)
class _Record:
    """What the cache remembers of a sequence. `chain[i]` names tokens up to the end of block i; it outlives
    preemption because tokens only grow. The first `num_committed` of its blocks are settled; of those before
    `gone_end` what a window has passed was let go. While it is swapped out, `slots` hold its first `num_kept`
    tokens."""

    root: bytes
    chain: list[bytes] = field(default_factory=list)
    num_committed: int = 0
    gone_end: int = 0
    slots: list[int] = field(default_factory=list)
    num_kept: int = 0


class PagedKVCache:
    """KVCache over one BlockPool, and `num_host_slots` and `num_disk_slots` blocks off the device. `root_fields` names
    all that shapes K/V besides tokens and the request's salt: model content version, adapter, K/V dtype, ...

    With a `window` a sequence lets go of the blocks that no later token sees (GONE stands in their place), and takes
    others instead for tokens that it has yet to compute: so it holds no more than KVWindow.most_blocks at once. A block
    let go stays in the prefix cache like any other; a prefix is found if what its next token sees is there."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        root_fields: Mapping[str, str],
        num_host_slots: int = 0,
        window: KVWindow | None = None,
        num_disk_slots: int = 0,
    ) -> None:
        self.block_size = block_size
        self.host_hits = 0
        self.host = HostTier(num_host_slots, num_disk_slots)
        self._pool = BlockPool(num_blocks, self._evicted)
        self._window = window
        self._caching = enable_prefix_caching
        self._root_fields = dict(root_fields)
        assert "salt" not in self._root_fields, "the salt comes from each request"
        self._records: dict[int, _Record] = {}
        self._owners: dict[int, Sequence] = {}
        self._foreign: set[int] = set()  # adopted, and not used here yet
        self._spilling = True

    @property
    def num_blocks(self) -> int:
        """See KVCache.num_blocks."""
        return self._pool.num_blocks

    @property
    def num_used(self) -> int:
        """See KVCache.num_used."""
        return self._pool.num_blocks - self._pool.num_free

    @property
    def num_free(self) -> int:
        """See KVCache.num_free."""
        return self._pool.num_free

    def published(self) -> list[bytes]:
        """The digests under which a block can be found now. One step of the interpreter: safe from any thread."""
        return self._pool.published()

    @property
    def num_sequences(self) -> int:
        """Sequences that hold blocks or of which anything else is remembered."""
        return len(self._records.keys() | self._owners.keys())

    @property
    def num_pinned(self) -> int:
        """Blocks' worth of pinned prefixes, whether or not they have been computed yet."""
        return self._pool.num_pinned

    def can_ever_fit(self, num_tokens: int) -> bool:
        """See KVCache.can_ever_fit()."""
        need = -(-num_tokens // self.block_size)
        if self._window is not None:
            need = min(need, self._window.least_blocks(self.block_size))
        return need <= self._pool.num_blocks

    # ------------------------------------------------------------------------------------------ sequences

    def lookup(self, seq: Sequence) -> PrefixHit:
        """See KVCache.lookup()."""
        record = self._records.get(seq.seq_id)
        if record is not None and record.num_kept:
            full = record.num_kept // self.block_size if self._caching else 0
            blocks = self._found(record.chain[:full], self._gone(record.num_kept))
            return PrefixHit(blocks, record.num_kept, tuple(record.slots[len(blocks) :]))
        if not self._shareable(seq):
            return PrefixHit((), 0)
        chain = self._chain(seq, (len(seq.tokens) - 1) // self.block_size)
        while True:
            gone = self._gone(len(chain) * self.block_size)
            blocks = self._found(chain, gone)
            slots = self._in_host(chain, len(blocks), gone)
            found = len(blocks) + len(slots)
            if self._window is None or found == len(chain):
                return PrefixHit(blocks, found * self.block_size, slots)
            del chain[found:]  # a shorter prefix sees what is not there as well, until it ends before that

    def reserve(self, seq: Sequence, num_tokens: int, hit: PrefixHit | None = None, spare: int = 0) -> bool:
        """See KVCache.reserve()."""
        if self._window is not None and hit is None:
            self._slide(seq)
        pool, computed = self._pool, seq.num_computed
        shared: tuple[int, ...] = ()
        if hit is not None:
            assert not seq.blocks, "only a sequence without blocks can take a prefix over"
            shared, computed = hit.block_ids, hit.num_tokens
        grow = -(-(computed + num_tokens) // self.block_size) - len(seq.blocks) - len(shared)
        if hit is not None:
            grow = self._growth(computed + num_tokens, hit)
        elif grow <= 0:
            return True
        if pool.num_free < grow + spare + self._resting(shared):
            return False
        if hit is not None:
            self._take_over(seq, hit)  # before any acquire(), which might evict the hit
            grow -= _count(hit.slots)
        for _ in range(grow):
            seq.blocks.append(pool.acquire())
        seq.table = None
        self._owners[seq.seq_id] = seq
        return True

    def _growth(self, num_tokens: int, hit: PrefixHit) -> int:
        """Blocks that a newcomer of num_tokens takes besides those of its hit: as many as it can use at once."""
        missing = -(-num_tokens // self.block_size) - len(hit.block_ids) - hit.slots.count(GONE)
        if self._window is None:
            return missing
        most = min(self._pool.num_blocks, self._window.most_blocks(self.block_size))
        return min(missing, most - _count(hit.block_ids))

    def _take_over(self, seq: Sequence, hit: PrefixHit) -> None:
        if not seq.admitted_before and self._shareable(seq):
            foreign = self._foreign.intersection(hit.block_ids)
            self._foreign -= foreign
            seq.num_cached = hit.num_tokens - len(foreign) * self.block_size
            self.host_hits += _count(hit.slots) * self.block_size
        for block in _real(hit.block_ids):
            self._pool.touch(block)
        seq.blocks.extend(hit.block_ids)
        seq.num_computed = hit.num_tokens
        if hit.num_tokens:
            record = self._record(seq)
            self._load(seq, hit.slots, record.chain[: hit.num_tokens // self.block_size] if self._caching else ())
            record.num_committed = hit.num_tokens // self.block_size
            self._drop_kept(record)

    def _load(self, seq: Sequence, slots: tuple[int, ...], chain: Seq[bytes]) -> None:
        """Append blocks with the slots' content. Published at once: who shares one waits for it, see loading()."""
        self.host.reading(_real(slots))  # before any acquire(), which might spill into them
        for slot in slots:
            if slot == GONE:
                seq.blocks.append(GONE)
                continue
            block = self._pool.acquire()
            self.host.load(slot, block)
            if len(seq.blocks) < len(chain):
                self._pool.publish(block, chain[len(seq.blocks)])
            seq.blocks.append(block)

    def demand(self, seq: Sequence, hit: PrefixHit) -> int:
        """See KVCache.demand()."""
        return self._growth(len(seq.tokens), hit) + self._resting(hit.block_ids)

    def extend(self, seq: Sequence, num_tokens: int) -> int:
        """See KVCache.extend()."""
        if self._window is None or self.reserve(seq, num_tokens):
            return num_tokens
        return len(seq.blocks) * self.block_size - seq.num_computed

    def held(self, seq: Sequence) -> int:
        """See KVCache.held()."""
        return len(seq.blocks) if self._window is None else _count(seq.blocks)

    def loading(self, seq: Sequence) -> bool:
        """See KVCache.loading()."""
        return bool(self.host.loading) and not self.host.loading.isdisjoint(seq.blocks)

    def freeable(self, seq: Sequence) -> int:
        """See KVCache.freeable()."""
        refs = self._pool.refs
        return sum(refs(block) == 1 for block in _real(seq.blocks))

    def commit(self, seq: Sequence) -> None:
        """See KVCache.commit()."""
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

    def _slide(self, seq: Sequence) -> None:
        """Let go of what the window has passed. What thereby becomes free is taken again at once where known tokens
        lack blocks, for it counts as theirs."""
        gone, record, blocks = self._gone(seq.num_computed), self._record(seq), seq.blocks
        if gone.stop <= max(gone.start, record.gone_end):
            return
        num_free = self._pool.num_free
        for i in range(max(gone.start, record.gone_end), gone.stop):
            if blocks[i] != GONE:
                self._pool.free(blocks[i])
                blocks[i] = GONE
        record.gone_end = gone.stop
        lacking = -(-len(seq.tokens) // self.block_size) - len(blocks)
        for _ in range(min(self._pool.num_free - num_free, lacking)):
            blocks.append(self._pool.acquire())
        seq.table = None

    def release(self, seq: Sequence) -> None:
        """See KVCache.release()."""
        for block in reversed(_real(seq.blocks)):  # a prefix without its tail is of use, a tail without its head is not
            self._pool.free(block)
        seq.blocks.clear()
        seq.table = None
        seq.num_computed = 0
        self._owners.pop(seq.seq_id, None)
        if record := self._records.get(seq.seq_id):
            record.num_committed = record.gone_end = 0

    def swap_out(self, seq: Sequence) -> bool:
        """See KVCache.swap_out()."""
        computed, size = seq.num_computed, self.block_size
        if not computed:
            return False
        num_blocks = -(-computed // size)
        digests: list[bytes | None] = [None] * num_blocks
        if self._caching:
            full = computed // size
            digests[:full] = self._chain(seq, full)
        blocks = seq.blocks[:num_blocks]
        real = [i for i, block in enumerate(blocks) if block != GONE]
        slots = self.host.hold([blocks[i] for i in real], [digests[i] for i in real])
        if slots is None:
            return False
        self.release(seq)
        record = self._record(seq)
        record.slots, record.num_kept = [GONE] * num_blocks, computed
        for i, slot in zip(real, slots, strict=True):
            record.slots[i] = slot
        return True

    def discard(self, seq: Sequence) -> None:
        """See KVCache.discard()."""
        for block in _real(seq.blocks):
            if self._pool.refs(block) == 1:
                self._pool.withdraw(block)

    def forget(self, seq: Sequence) -> None:
        """See KVCache.forget()."""
        self.release(seq)
        if record := self._records.pop(seq.seq_id, None):
            self._drop_kept(record)

    def take_copies(self) -> Copies:
        """See KVCache.take_copies()."""
        return self.host.take_copies()

    # ------------------------------------------------------------------------------------------- prefixes

    def digests(self, token_ids: Seq[int], salt: str) -> list[bytes]:
        """The names of the whole blocks of token_ids."""
        parent, size, chain = self._root(salt), self.block_size, []
        for i in range(len(token_ids) // size):
            parent = block_digest(parent, token_ids[i * size : (i + 1) * size])
            chain.append(parent)
        return chain

    def pin(self, digests: Iterable[bytes]) -> None:
        """Blocks under these digests, also ones yet to be computed, are evicted last of all."""
        for digest in digests:
            self._pool.pin(digest)

    def is_pinned(self, digest: bytes) -> bool:
        """Whether the block of this digest is pinned, cached or not."""
        return self._pool.is_pinned(digest)

    def unpin(self, digests: Iterable[bytes]) -> None:
        """Let blocks of these digests be evicted like any others. Idempotent."""
        for digest in digests:
            self._pool.unpin(digest)

    def find(self, digests: Seq[bytes]) -> tuple[int, ...]:
        """The blocks of the longest prefix that is on the device. Valid until the cache is next changed."""
        return self._found(digests)

    def adopt(self, digests: Seq[bytes]) -> list[tuple[int, int]]:
        """Make room for the blocks of a prefix that was computed elsewhere: (index, block) for each that is not here
        and fits. The caller writes their content before anything else happens: they can be found from now on."""
        fresh: list[tuple[int, int]] = []
        held: list[int] = []
        self._spilling = False  # the content is overwritten before a plan could save it
        for i, digest in enumerate(digests):
            block = self._pool.find(digest)
            if block is not None:
                self._pool.touch(block)
            elif self._pool.num_free:
                block = self._pool.acquire()
                self._pool.publish(block, digest)
                fresh.append((i, block))
            else:
                break
            held.append(block)
        self._spilling = True
        self._foreign.update(block for _, block in fresh)
        for block in reversed(held):
            self._pool.free(block)
        return fresh

    def check(self) -> None:
        """See KVCache.check()."""
        self._pool.check()
        self.host.check()
        held = Counter(block for seq in self._owners.values() for block in _real(seq.blocks))
        for block in range(self._pool.num_blocks):
            assert held[block] == self._pool.refs(block), f"block {block}: {held[block]} owners, refs differ"
        for seq in self._owners.values():
            real = _real(seq.blocks)
            assert len(set(real)) == len(real), f"sequence {seq.seq_id} holds a block twice"
            passed = set(self._gone(seq.num_computed))
            assert {i for i, block in enumerate(seq.blocks) if block == GONE} <= passed, "a block went too early"
            assert seq.num_computed <= len(seq.blocks) * self.block_size, f"sequence {seq.seq_id} lacks blocks"
            assert seq.table is None or seq.table == tuple(seq.blocks), f"sequence {seq.seq_id} has an old table"
        kept = Counter(slot for record in self._records.values() for slot in _real(record.slots))
        kept.update(self.host.being_read)
        for slot in range(self.host.num_slots):
            assert kept[slot] == self.host.refs(slot), f"host slot {slot}: {kept[slot]} holders, refs differ"

    def _evicted(self, block: int, digest: bytes) -> None:
        self._foreign.discard(block)
        if self._spilling and self.host.pool.num_blocks:
            self.host.spill(block, digest)

    def _gone(self, num_computed: int) -> range:
        return range(0) if self._window is None else self._window.gone(num_computed, self.block_size)

    def _found(self, digests: Iterable[bytes], gone: range = range(0)) -> tuple[int, ...]:
        blocks: list[int] = []
        for i, digest in enumerate(digests):
            block = GONE if i in gone else self._pool.find(digest)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def _in_host(self, digests: Seq[bytes], start: int, gone: range) -> tuple[int, ...]:
        slots: list[int] = []
        if self.host.pool.num_blocks:
            for i in range(start, len(digests)):
                slot = GONE if i in gone else self.host.find(digests[i])
                if slot is None:
                    break
                slots.append(slot)
        return tuple(slots)

    def _resting(self, blocks: Iterable[int]) -> int:
        return sum(self._pool.refs(block) == 0 for block in blocks if block != GONE)

    def _drop_kept(self, record: _Record) -> None:
        self.host.drop(_real(record.slots))
        record.slots, record.num_kept = [], 0

    def _shareable(self, seq: Sequence) -> bool:
        return self._caching and seq.request.sampling.prompt_logprobs is None

    def _root(self, salt: str) -> bytes:
        return root_digest({**self._root_fields, "salt": salt})

    def _record(self, seq: Sequence) -> _Record:
        record = self._records.get(seq.seq_id)
        if record is None:
            record = self._records[seq.seq_id] = _Record(self._root(seq.request.cache_salt))
        return record

    def _chain(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """Digests of the first num_blocks blocks of seq.tokens, each computed once in the sequence's life."""
        record = self._record(seq)
        chain, size = record.chain, self.block_size
        for i in range(len(chain), num_blocks):
            chain.append(block_digest(chain[-1] if chain else record.root, seq.tokens[i * size : (i + 1) * size]))
        return chain[:num_blocks]


def _real(ids: Iterable[int]) -> list[int]:
    return [i for i in ids if i != GONE]


def _count(ids: Seq[int]) -> int:
    """How many of them are blocks or slots, not GONE."""
    return len(ids) - ids.count(GONE)

"""Ref-counted blocks that keep their content after the last owner until the room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class BlockPool:
    """Every operation is O(1) in the size of the pool.

    A block is *owned* (one or more references) or free. A block may be *published* under a digest, owned or
    not; `find` gives it out for sharing. Of the free blocks unpublished ones are used first, then the one
    freed longest ago, whose digest is thereby forgotten; blocks under *pinned* digests go last of all.
    `on_evict` is told of each published block that is about to be used anew, and its digest.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int, bytes], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._refs = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        # Last in, first out: a block used a moment ago is likelier to be in the CPU's caches.
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()  # cached, and under pinned digests
        self._pinned: set[bytes] = set()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._blank) + len(self._cached) + len(self._kept)

    def refs(self, block: int) -> int:
        """How many hold a block."""
        return self._refs[block]

    def digest(self, block: int) -> bytes | None:
        """The digest that a block is published under, if it is."""
        return self._digests[block]

    def acquire(self) -> int:
        """A block with one reference and no content. The caller has seen num_free > 0."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = (self._cached or self._kept).popitem(last=False)
            digest = self._digests[block]
            assert digest is not None
            del self._index[digest]
            self._digests[block] = None
            if self._on_evict is not None:
                self._on_evict(block, digest)
        self._refs[block] = 1
        return block

    def touch(self, block: int) -> None:
        """One more reference to a block that is owned, or published and free."""
        if self._refs[block] == 0:
            del self._resting(block)[block]
        self._refs[block] += 1

    def free(self, block: int) -> None:
        """One reference less. Of blocks that become free together, those freed first are evicted first."""
        assert self._refs[block] > 0, f"block {block} freed twice"
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if self._digests[block] is None:
                self._blank.append(block)
            else:
                self._resting(block)[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Let others find an owned block. Without effect if another block is published under `digest`."""
        assert self._refs[block] > 0 and self._digests[block] is None, f"block {block} cannot be published"
        if digest not in self._index:
            self._index[digest] = block
            self._digests[block] = digest

    def withdraw(self, block: int) -> None:
        """Undo publish() of an owned block: nobody finds it any more."""
        assert self._refs[block] > 0, f"block {block} cannot be withdrawn"
        if (digest := self._digests[block]) is not None:
            del self._index[digest]
            self._digests[block] = None

    def published(self) -> list[bytes]:
        """All digests that find() would know. One step of the interpreter: safe from any thread."""
        return list(self._index)

    def find(self, digest: bytes) -> int | None:
        """The published block; valid until the next acquire() unless touched."""
        return self._index.get(digest)

    def pin(self, digest: bytes) -> None:
        """From now on a block under `digest`, present or yet to come, is evicted only when nothing else is free."""
        self._repin(digest, self._pinned.add)

    def unpin(self, digest: bytes) -> None:
        """Undo pin(). Idempotent."""
        self._repin(digest, self._pinned.discard)

    def is_pinned(self, digest: bytes) -> bool:
        """Whether a block of this digest is kept while others can be evicted."""
        return digest in self._pinned

    @property
    def num_pinned(self) -> int:
        """Digests, whether or not a block is published under them."""
        return len(self._pinned)

    def _repin(self, digest: bytes, change: Callable[[bytes], None]) -> None:
        block = self._index.get(digest)
        resting = block is not None and self._refs[block] == 0
        if block is not None and resting:
            del self._resting(block)[block]
        change(digest)
        if block is not None and resting:
            self._resting(block)[block] = None

    def _resting(self, block: int) -> OrderedDict[int, None]:
        """Where a free published block waits for its next use."""
        return self._kept if self._pinned and self._digests[block] in self._pinned else self._cached

    def check(self) -> None:
        """Assert that every block is blank, cached or owned, just once, and the index is exact. O(pool)."""
        owned = [b for b, refs in enumerate(self._refs) if refs]
        free = [*self._blank, *self._cached, *self._kept]
        assert sorted([*free, *owned]) == list(range(self.num_blocks)), "blocks lost or doubled"
        assert all(self._digests[b] is None for b in self._blank), "a blank block is published"
        assert all(self._digests[b] is not None for b in self._cached), "a cached block has no digest"
        assert all(self._digests[b] in self._pinned for b in self._kept), "kept without a pin"
        assert not any(self._digests[b] in self._pinned for b in self._cached), "pinned, but not kept"
        assert self._index == {d: b for b, d in enumerate(self._digests) if d is not None}, "index out of step"

"""Ref-counted blocks that keep their content after the last owner until the room is needed."""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """Every operation is O(1) in the size of the pool.

    A block is *owned* (one or more references) or free. A block may be *published* under a digest, owned or
    not; `find` gives it out for sharing. Of the free blocks unpublished ones are used first, then the one
    freed longest ago, whose digest is thereby forgotten.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        # Last in, first out: a block used a moment ago is likelier to be in the CPU's caches.
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def acquire(self) -> int:
        """A block with one reference and no content. The caller has seen num_free > 0."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._unpublish(block)
        self._refs[block] = 1
        return block

    def touch(self, block: int) -> None:
        """One more reference to a published block, free or owned."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def free(self, block: int) -> None:
        """One reference less. Of blocks that become free together, those freed first are evicted first."""
        assert self._refs[block] > 0, f"block {block} freed twice"
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if self._digests[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Let others find an owned block. Without effect if another block is published under `digest`."""
        assert self._refs[block] > 0 and self._digests[block] is None, f"block {block} cannot be published"
        if digest not in self._index:
            self._index[digest] = block
            self._digests[block] = digest

    def find(self, digest: bytes) -> int | None:
        """The published block; valid until the next acquire() unless touched."""
        return self._index.get(digest)

    def _unpublish(self, block: int) -> None:
        digest = self._digests[block]
        assert digest is not None
        del self._index[digest]
        self._digests[block] = None

    def check(self) -> None:
        """Assert that every block is blank, cached or owned, just once, and the index is exact. O(pool)."""
        owned = [b for b, refs in enumerate(self._refs) if refs]
        assert sorted([*self._blank, *self._cached, *owned]) == list(range(self.num_blocks)), "blocks lost or doubled"
        assert all(self._digests[b] is None for b in self._blank), "a blank block is published"
        assert all(self._digests[b] is not None for b in self._cached), "a cached block has no digest"
        assert self._index == {d: b for b, d in enumerate(self._digests) if d is not None}, "index out of step"

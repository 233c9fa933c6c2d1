"""Blocks in host memory: which slots hold what, and the copies that make it so."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from engine.kv.pool import BlockPool


class Copies(NamedTuple):
    """What a plan must carry, see StepPlan: (device block, host slot) and (host slot, device block)."""

    stores: tuple[tuple[int, int], ...]
    loads: tuple[tuple[int, int], ...]


class HostTier:
    """Accounting only, O(1) per block. A slot is held by preempted sequences, or keeps an evicted prefix until
    the room is needed: a second BlockPool, whose "device" is host memory."""

    def __init__(self, num_slots: int) -> None:
        self.pool = BlockPool(num_slots)
        self.num_stored = 0
        self.num_spilled = 0
        self.num_loaded = 0
        self._stores: list[tuple[int, int]] = []
        self._loads: list[tuple[int, int]] = []
        self.loading: set[int] = set()  # device blocks that get their content with the next plan
        self.being_read: list[int] = []  # one reference each until the plan is made that reads them

    @property
    def num_used(self) -> int:
        """Slots that preempted sequences hold."""
        return self.pool.num_blocks - self.pool.num_free

    def spill(self, block: int, digest: bytes) -> None:
        """Keep what a device block holds, which is about to be used for something else, if there is room."""
        pool = self.pool
        slot = pool.find(digest)
        if slot is not None:  # there already: it was used just now, so it goes later
            pool.touch(slot)
        elif pool.num_free:
            slot = self._store(block, digest)
            self.num_spilled += 1
        else:
            return
        pool.free(slot)

    def hold(self, blocks: Seq[int], digests: Seq[bytes | None]) -> list[int] | None:
        """Slots with the blocks' content, one reference each; None if there is no room. A digest of None: nobody
        else may find it."""
        pool = self.pool
        found = [None if digest is None else pool.find(digest) for digest in digests]
        need = sum(slot is None or pool.refs(slot) == 0 for slot in found)
        if need > pool.num_free:
            return None
        for slot in found:
            if slot is not None:
                pool.touch(slot)
        return [
            self._store(block, digest) if slot is None else slot
            for slot, block, digest in zip(found, blocks, digests, strict=True)
        ]

    def drop(self, slots: Iterable[int]) -> None:
        """Give held slots back, the last ones to be evicted first."""
        for slot in reversed(list(slots)):
            self.pool.free(slot)

    def reading(self, slots: Iterable[int]) -> None:
        """Keep slots that are about to be loaded from being used for anything else before they are."""
        for slot in slots:
            self.pool.touch(slot)
            self.being_read.append(slot)

    def load(self, slot: int, block: int) -> None:
        self._loads.append((slot, block))
        self.loading.add(block)
        self.num_loaded += 1

    def take_copies(self) -> Copies:
        """What has been decided since the last call; the caller puts it into the next plan."""
        if not (self._stores or self._loads):
            return Copies((), ())
        copies = Copies(tuple(self._stores), tuple(self._loads))
        self._stores.clear()
        self._loads.clear()
        self.loading.clear()
        self.drop(self.being_read)
        self.being_read.clear()
        return copies

    def _store(self, block: int, digest: bytes | None) -> int:
        slot = self.pool.acquire()
        if digest is not None:
            self.pool.publish(slot, digest)
        self._stores.append((block, slot))
        self.num_stored += 1
        return slot

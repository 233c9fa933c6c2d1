"""Blocks off the device, in host memory and on disk: which slots hold what, and the copies that make it so."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from engine.kv.pool import BlockPool

Pairs = tuple[tuple[int, int], ...]


class Copies(NamedTuple):
    """What a plan must carry, see StepPlan."""

    stores: Pairs
    loads: Pairs
    moves: Pairs


class HostTier:
    """Accounting only, O(1) per block. A slot is held by preempted sequences, or keeps an evicted prefix until
    the room is needed: a second BlockPool, whose "device" is host memory. What has to leave that goes to a third one,
    on disk, if there is room for any; its slots are numbered after those of host memory."""

    def __init__(self, num_slots: int, num_disk_slots: int = 0) -> None:
        self.pool = BlockPool(num_slots, self._evicted)
        self.disk = BlockPool(num_disk_slots)
        self.num_stored = 0
        self.num_spilled = 0
        self.num_loaded = 0
        self.num_to_disk = 0
        self.num_from_disk = 0
        self._moves: list[tuple[int, int]] = []
        self._stores: list[tuple[int, int]] = []
        self._loads: list[tuple[int, int]] = []
        self._fresh: set[int] = set()  # slots that get their content with the next plan
        self.loading: set[int] = set()  # device blocks that get their content with the next plan
        self.being_read: list[int] = []  # one reference each until the plan is made that reads them

    @property
    def num_slots(self) -> int:
        """Slots in host memory and on disk together."""
        return self.pool.num_blocks + self.disk.num_blocks

    @property
    def num_used(self) -> int:
        """Slots that preempted sequences hold."""
        return self.pool.num_blocks - self.pool.num_free

    def refs(self, slot: int) -> int:
        """How many sequences hold a slot."""
        pool, block = self._place(slot)
        return pool.refs(block)

    def find(self, digest: bytes) -> int | None:
        """The slot that holds the block of this digest, in host memory or on disk; None if there is none."""
        slot = self.pool.find(digest)
        if slot is None and (on_disk := self.disk.find(digest)) is not None:
            slot = self.pool.num_blocks + on_disk
        return slot

    def spill(self, block: int, digest: bytes) -> None:
        """Keep the content of a device block that is about to be overwritten, if there is room."""
        slot = self.find(digest)
        if slot is not None:  # there already: it was used just now, so it goes later
            self._touch(slot)
        elif self.pool.num_free:
            slot = self._store(block, digest)
            self.num_spilled += 1
        else:
            return
        self.drop((slot,))

    def hold(self, blocks: Seq[int], digests: Seq[bytes | None]) -> list[int] | None:
        """Slots of host memory with the blocks' content, one reference each; None if there is no room. A digest of
        None: nobody else may find it."""
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
            pool, block = self._place(slot)
            pool.free(block)

    def reading(self, slots: Iterable[int]) -> None:
        """Keep slots that are about to be loaded from being used for anything else before they are."""
        for slot in slots:
            self._touch(slot)
            self.being_read.append(slot)

    def load(self, slot: int, block: int) -> None:
        """Have the next plan copy a slot to a block of the device."""
        self._loads.append((slot, block))
        self.loading.add(block)
        self.num_loaded += 1
        self.num_from_disk += slot >= self.pool.num_blocks

    def take_copies(self) -> Copies:
        """What has been decided since the last call; the caller puts it into the next plan."""
        if not (self._stores or self._loads):  # no move without a store that needs the slot
            return Copies((), (), ())
        copies = Copies(tuple(self._stores), tuple(self._loads), tuple(self._moves))
        self._moves.clear()
        self._stores.clear()
        self._loads.clear()
        self._fresh.clear()
        self.loading.clear()
        self.drop(self.being_read)
        self.being_read.clear()
        return copies

    def check(self) -> None:
        """Assert that every slot is free, cached or held exactly as counted. For tests: O(slots)."""
        self.pool.check()
        self.disk.check()

    def _place(self, slot: int) -> tuple[BlockPool, int]:
        first = self.pool.num_blocks
        return (self.pool, slot) if slot < first else (self.disk, slot - first)

    def _touch(self, slot: int) -> None:
        pool, block = self._place(slot)
        pool.touch(block)

    def _store(self, block: int, digest: bytes | None) -> int:
        slot = self.pool.acquire()
        if digest is not None:
            self.pool.publish(slot, digest)
        self._stores.append((block, slot))
        self._fresh.add(slot)
        self.num_stored += 1
        return slot

    def _evicted(self, slot: int, digest: bytes) -> None:
        """Move a slot's content to disk.

        Not if it is there already, nothing there may go, or the slot has not even got its content.
        """
        disk = self.disk
        if (on_disk := disk.find(digest)) is not None:
            disk.touch(on_disk)
        elif disk.num_free and slot not in self._fresh:
            on_disk = disk.acquire()
            disk.publish(on_disk, digest)
            self._moves.append((slot, self.pool.num_blocks + on_disk))
            self.num_to_disk += 1
        else:
            return
        disk.free(on_disk)

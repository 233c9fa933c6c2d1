"""Blocks between the device's cache, host memory and disk, as a plan's `moves`, `stores` and `loads` say.

Off the device a block is one row: its part of every tensor of the cache, one after the other. Rows on disk are mapped
into memory and written back by the system in its own time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kv.disk_file import rows_on_disk
from engine.kv.storage import KVStorage
from engine.machine import memory_limit

Pairs = Sequence[tuple[int, int]]


class BlockCopies(Protocol):
    """Copies blocks between the cache, host memory and disk, as plans say."""

    def run(self, stores: Pairs, loads: Pairs, moves: Pairs = ()) -> None:
        """Before the slices of every plan, also of one without copies. Afterwards the slices may write stored
        blocks; loaded ones are complete when the next run() returns."""


def make_copies(
    storage: KVStorage, num_slots: int, num_disk_slots: int = 0, disk_dir: str | None = None
) -> BlockCopies:
    """Reserves host memory for num_slots blocks, and disk for more. Raises ConfigError if there is not so much."""
    size, have = num_slots * storage.layout.bytes_per_block, memory_limit()
    if have is not None and size >= have:
        raise ConfigError(f"host_kv_cache_gib asks for {size} bytes per rank; this process may have {have}")
    on_gpu = storage.layers[0][0].is_cuda
    disk = rows_on_disk(disk_dir, num_disk_slots, storage.layout.bytes_per_block) if num_disk_slots else None
    return CudaCopies(storage, num_slots, disk) if on_gpu else CpuCopies(storage, num_slots, disk)


def seconds_per_block(copies: BlockCopies, num_slots: int) -> float:
    """What a store, or a load, of one block takes, several going together. Overwrites blocks and slots."""
    count = min(num_slots, 16)
    pairs = [(0, slot) for slot in range(count)]  # any block will do, and there is always a block 0
    copies.run(pairs, ())  # memory is mapped when it is first touched
    start = time.perf_counter()
    copies.run(pairs, ())
    copies.run((), [(slot, block) for block, slot in pairs])
    copies.run((), ())
    return (time.perf_counter() - start) / (2 * count)


class CpuCopies:
    """In the calling thread: there is nothing for a copy to overlap with."""

    def __init__(self, storage: KVStorage, num_slots: int, disk: np.ndarray | None = None) -> None:
        self._parts = [part.numpy() for part in block_parts(storage, torch.uint8)]
        self._rows = torch.zeros(num_slots, storage.layout.bytes_per_block, dtype=torch.uint8).numpy()
        self._disk = disk

    def run(self, stores: Pairs, loads: Pairs, moves: Pairs = ()) -> None:
        """See BlockCopies.run(). The copies are done when it returns."""
        first = len(self._rows)
        for slot, to in moves:
            assert self._disk is not None
            self._disk[to - first] = self._rows[slot]
        if stores:
            blocks, slots = (list(ids) for ids in zip(*stores, strict=True))
            for part, columns in self._columns():
                self._rows[slots, columns] = part[blocks]
        self._load(self._rows, [pair for pair in loads if pair[0] < first])
        if self._disk is not None:
            self._load(self._disk, [(slot - first, block) for slot, block in loads if slot >= first])

    def _load(self, rows: np.ndarray, pairs: Pairs) -> None:
        if pairs:
            slots, blocks = (list(ids) for ids in zip(*pairs, strict=True))
            for part, columns in self._columns():
                part[blocks] = rows[slots, columns]

    def _columns(self) -> Iterator[tuple[np.ndarray, slice]]:
        at = 0
        for part in self._parts:
            yield part, slice(at, at + part.shape[1])
            at += part.shape[1]


class CudaCopies:
    """Pinned host memory and a stream of its own. Only moving blocks into and out of a staging buffer on the device
    holds the model up; what crosses the bus does so beside its kernels."""

    def __init__(self, storage: KVStorage, num_slots: int, disk: np.ndarray | None = None) -> None:
        whole = all(t.stride(0) * t.element_size() % 8 == 0 for layer in storage.by_block for t in layer)
        word = torch.int64 if whole else torch.uint8
        self._parts = block_parts(storage, word)
        self._device = self._parts[0].device
        width = sum(part.shape[1] for part in self._parts)
        self._rows = torch.zeros(num_slots, width, dtype=word, pin_memory=True)
        self._disk = self._rows[:0] if disk is None else torch.from_numpy(disk).view(word)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._arriving: tuple[Tensor, Tensor, torch.cuda.Event] | None = None

    def run(self, stores: Pairs, loads: Pairs, moves: Pairs = ()) -> None:
        """See BlockCopies.run(). Copies to the device run beside the step and are waited for by the next one."""
        current = torch.cuda.current_stream(self._device)
        if self._arriving is not None:
            staged, blocks, done = self._arriving
            self._arriving = None
            current.wait_event(done)
            scatter(self._parts, blocks, staged)
        if moves:
            self._stream.synchronize()  # what the last plans store is in host memory, and what they load is out of it
            for slot, to in moves:
                self._disk[to - len(self._rows)].copy_(self._rows[slot])
        if stores:
            staged = gather(self._parts, self._ids(block for block, _ in stores))
            self._stream.wait_stream(current)
            staged.record_stream(self._stream)  # it is freed here, and still being read there
            with torch.cuda.stream(self._stream):
                for row, (_, slot) in zip(staged, stores, strict=True):
                    self._rows[slot].copy_(row, non_blocking=True)
        if loads:
            blocks = self._ids(block for _, block in loads)
            with torch.cuda.stream(self._stream):
                staged = torch.empty(len(loads), self._rows.shape[1], dtype=self._rows.dtype, device=self._device)
                for row, (slot, _) in zip(staged, loads, strict=True):
                    row.copy_(self._row(slot), non_blocking=True)
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record(self._stream)
            staged.record_stream(current)
            self._arriving = staged, blocks, done

    def _row(self, slot: int) -> Tensor:
        first = len(self._rows)
        return self._rows[slot] if slot < first else self._disk[slot - first]

    def _ids(self, ids: Iterable[int]) -> Tensor:
        return torch.tensor(list(ids), device=self._device)


def gather(parts: Sequence[Tensor], blocks: Tensor) -> Tensor:
    """The rows [len(blocks), width] of blocks."""
    return torch.cat([part.index_select(0, blocks) for part in parts], dim=1)


def scatter(parts: Sequence[Tensor], blocks: Tensor, rows: Tensor) -> None:
    """Write rows [len(blocks), width] back to blocks."""
    at = 0
    for part in parts:
        part.index_copy_(0, blocks, rows[:, at : at + part.shape[1]])
        at += part.shape[1]


def block_parts(storage: KVStorage, word: torch.dtype) -> list[Tensor]:
    """Each tensor of the cache as [num_blocks, words of a block], whatever its order inside a block."""
    flat = (t.as_strided((t.shape[0], t.stride(0)), (t.stride(0), 1)) for layer in storage.by_block for t in layer)
    return [t.view(word) for t in flat]

"""Native calls: made one at a time, or recorded once and replayed by a single call."""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections import defaultdict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_LINE = 64  # bytes of a cache line

Floats = npt.NDArray[np.float32]


class NativeFunction:
    """A C function whose one argument points to a struct of 8-byte fields: P pointer (0 for null), q int64,
    d double. Calling it releases the GIL."""

    def __init__(self, library: ctypes.CDLL, name: str, fields: str) -> None:
        self.call = library[name]
        self.call.argtypes, self.call.restype = [ctypes.c_char_p], None
        self.address = ctypes.cast(self.call, ctypes.c_void_p).value
        self.pack = struct.Struct(fields).pack


class BufferPool:
    """Float32 memory for the outputs of recorded calls, of at most `max_rows` rows each.

    A buffer is taken until the last tensor that shares it is gone, then given out again; its memory lives as
    long as the pool. So the many outputs of a step need little memory, and all tapes recorded over one pool
    need no more than one of them.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._buffers: dict[int, Floats] = {}  # by address
        self._free: defaultdict[int, list[Floats]] = defaultdict(list)  # by number of columns

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def empty(self, rows: int, columns: int) -> Tensor:
        """[rows, columns], contiguous, uninitialised."""
        if rows > self._max_rows:
            raise ValueError(f"{rows} rows, the pool's buffers have {self._max_rows}")
        free = self._free[columns]
        buffer = free.pop() if free else self._new(columns)
        # torch keeps this very array alive until nothing uses the tensor's storage any more.
        lease = buffer[:rows]
        weakref.finalize(lease, free.append, buffer).atexit = False
        return torch.from_numpy(lease)

    def alias(self, x: Tensor) -> Tensor:
        """The memory of a tensor that empty() gave, without keeping it taken: what a replay leaves there."""
        return torch.from_numpy(self._buffers[x.data_ptr()][: x.shape[0]])

    def _new(self, columns: int) -> Floats:
        size = self._max_rows * columns
        memory = np.empty(size + _LINE // 4, np.float32)
        offset = -memory.ctypes.data % _LINE // 4
        buffer = memory[offset : offset + size].reshape(self._max_rows, columns)
        self._buffers[buffer.ctypes.data] = buffer
        return buffer


class Tape:
    """A list of native calls. Replaying needs all memory that they point to: the owner keeps weights, caches
    and inputs; the outputs belong to `buffers`."""

    def __init__(self, library: ctypes.CDLL, buffers: BufferPool) -> None:
        self.buffers = buffers
        self._replay = library.sluice_replay
        self._replay.argtypes, self._replay.restype = [ctypes.c_void_p, ctypes.c_int64], None
        self._recorded: list[tuple[int, bytes]] = []
        self._arguments = np.empty(0, np.int64)
        self._calls = np.empty((0, 2), np.int64)

    def append(self, function: NativeFunction, arguments: bytes) -> None:
        assert function.address is not None
        self._recorded.append((function.address, arguments))

    def finish(self) -> None:
        """No more calls: lay them out for replay."""
        self._arguments = np.frombuffer(b"".join(arguments for _, arguments in self._recorded), np.int64)
        sizes = [len(arguments) for _, arguments in self._recorded]
        self._calls = np.empty((len(sizes), 2), np.int64)
        self._calls[:, 0] = [address for address, _ in self._recorded]
        self._calls[:, 1] = self._arguments.ctypes.data + np.cumsum([0, *sizes])[:-1]
        self._recorded.clear()

    def __len__(self) -> int:
        return len(self._calls)

    def replay(self) -> None:
        """Run all calls again, on what their inputs hold now. Releases the GIL once for all of them."""
        self._replay(self._calls.ctypes.data, len(self._calls))

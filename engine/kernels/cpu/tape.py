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
    r and s int64 too, the call's number of rows and of sequences, d double. Calling it releases the GIL."""

    def __init__(self, library: ctypes.CDLL, name: str, fields: str) -> None:
        self.call = library[name]
        self.call.argtypes, self.call.restype = [ctypes.c_char_p], None
        self.address = ctypes.cast(self.call, ctypes.c_void_p).value or 0
        kinds = fields.replace(" ", "")
        self.pack = struct.Struct(kinds.replace("r", "q").replace("s", "q")).pack
        self.rows_at = [i for i, kind in enumerate(kinds) if kind == "r"]
        self.seqs_at = [i for i, kind in enumerate(kinds) if kind == "s"]


class BufferPool:
    """Float32 memory for the outputs of recorded calls, of at most `max_rows` rows each.

    A buffer is taken until the last tensor that shares it is gone, then given out again; its memory lives as
    long as the pool. So the many outputs of a step need little memory.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._buffers: dict[int, Floats] = {}  # by address
        self._free: defaultdict[int, list[Floats]] = defaultdict(list)  # by number of columns

    @property
    def max_rows(self) -> int:
        """Rows that each buffer has room for."""
        return self._max_rows

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers together."""
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
        """The memory of a tensor that empty() gave, all its rows, without keeping it taken: what a replay leaves
        there."""
        return torch.from_numpy(self._buffers[x.data_ptr()])

    def _new(self, columns: int) -> Floats:
        size = self._max_rows * columns
        memory = np.empty(size + _LINE // 4, np.float32)
        offset = -memory.ctypes.data % _LINE // 4
        buffer = memory[offset : offset + size].reshape(self._max_rows, columns)
        self._buffers[buffer.ctypes.data] = buffer
        return buffer


class Tape:
    """A list of native calls, all of one number of rows and of sequences, which every replay may choose anew.
    Replaying needs all memory that they point to: the owner keeps weights, caches and inputs, as long as the largest
    replay needs them; the outputs belong to `buffers`."""

    def __init__(self, library: ctypes.CDLL, buffers: BufferPool) -> None:
        self.buffers = buffers
        self._replay = library.sluice_replay
        self._replay.argtypes, self._replay.restype = [ctypes.c_void_p, ctypes.c_int64], None
        self._recorded: list[tuple[NativeFunction, bytes]] = []
        self._arguments = np.empty(0, np.int64)
        self._calls = np.empty((0, 2), np.int64)
        self._rows_at, self._seqs_at = np.empty((2, 0), np.int64)

    def append(self, function: NativeFunction, arguments: bytes) -> None:
        """Record a call of `function` with `arguments`."""
        self._recorded.append((function, arguments))

    def finish(self) -> None:
        """Lay the calls out for replay; append() is not to be called any more."""
        self._arguments = np.frombuffer(bytearray().join(arguments for _, arguments in self._recorded), np.int64)
        begins = np.cumsum([0, *(len(arguments) // 8 for _, arguments in self._recorded)])[:-1]
        self._calls = np.empty((len(self._recorded), 2), np.int64)
        self._calls[:, 0] = [function.address for function, _ in self._recorded]
        self._calls[:, 1] = self._arguments.ctypes.data + 8 * begins
        functions = [function for function, _ in self._recorded]
        self._rows_at = _places(begins, [function.rows_at for function in functions])
        self._seqs_at = _places(begins, [function.seqs_at for function in functions])
        self._recorded.clear()

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def row_counts(self) -> set[int]:
        """Numbers of rows that the calls have. More than one: they cannot be replayed with another."""
        return set(self._arguments[self._rows_at].tolist())

    def replay(self, rows: int | None = None, seqs: int | None = None) -> None:
        """Run all calls again, on what their inputs hold now, for so many rows and sequences, by default as many as
        the last time. Releases the GIL once for all of them."""
        if rows is not None:
            if rows > self.buffers.max_rows:
                raise ValueError(f"{rows} rows, the pool's buffers have {self.buffers.max_rows}")
            self._arguments[self._rows_at] = rows
        if seqs is not None:
            self._arguments[self._seqs_at] = seqs
        self._replay(self._calls.ctypes.data, len(self._calls))


def _places(begins: npt.NDArray[np.int64], fields: list[list[int]]) -> npt.NDArray[np.int64]:
    """Where the fields of each call lie among the arguments of all."""
    return np.array([begin + i for begin, own in zip(begins, fields, strict=True) for i in own], np.int64)

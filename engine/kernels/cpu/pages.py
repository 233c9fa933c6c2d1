"""Memory on the system's large pages, where it gives them for the asking.

A step streams all weights once. On pages of 4 kB that costs a fifth of the memory bandwidth: address translations miss
their cache, and the processor's own prefetching stops at every page's end.
"""

from __future__ import annotations

import ctypes
import logging
import mmap

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

PAGE = 1 << 21
_CHUNK = 32 * PAGE  # address space taken at a time; memory only as it is written
_LINE = 64


class LargePages:
    """Tensors side by side in such memory, in the order in which they come. A tensor's memory is given back when
    those that lie near it are gone as well."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def place(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of the tensor in this memory."""
        at = self._used + -self._used % _LINE
        if at + tensor.nbytes > self._chunk.nbytes:
            self._chunk = _reserve(max(_CHUNK, tensor.nbytes + -tensor.nbytes % PAGE))
            at = 0
        self._used = at + tensor.nbytes
        return self._chunk[at : self._used].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def prefer_large_pages(tensor: Tensor) -> None:
    """For what will first be written in memory that `tensor`, on the CPU, has already."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    begin = tensor.data_ptr() + -tensor.data_ptr() % PAGE
    size = (tensor.data_ptr() + tensor.nbytes - begin) // PAGE * PAGE
    if advice is None or size <= 0:
        return
    if ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice):
        logger.info("no large pages: madvise failed with errno %d", ctypes.get_errno())


def _reserve(size: int) -> Tensor:
    """`size` bytes that begin with a large page."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = torch.frombuffer(mmap.mmap(-1, size + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    skip = -memory.data_ptr() % PAGE
    chunk = memory[skip : skip + size]
    prefer_large_pages(chunk)
    return chunk

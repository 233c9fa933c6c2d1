"""How fast this machine reads memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine.kernels.cpu.pages import LargePages

_BYTES = 1 << 29
_SMALLEST = 1 << 27


def read_bandwidth(budget_s: float, quick: bool = False) -> float:
    """Bytes per second that torch's threads together read from a buffer that no cache holds: the best of all tries
    with two kinds of reduction, on large pages as the engine has its weights. Takes about budget_s."""
    buffer = LargePages().place(torch.ones((_SMALLEST if quick else _BYTES) // 4))
    words = buffer.view(torch.int64)
    kinds: tuple[Callable[[], object], ...] = (lambda: words.sum(), lambda: buffer.sum())
    best = float("inf")
    until = time.perf_counter() + budget_s
    while True:
        for read in kinds:
            start = time.perf_counter()
            read()
            best = min(best, time.perf_counter() - start)
        if time.perf_counter() > until:
            return buffer.nbytes / best

"""Compiled CPU kernels (C++, AVX-512 where the machine has it) for float32 activations.

`src/` is compiled at first use (`build`) and called through ctypes (`ops`), which releases the GIL. Weights are laid
out for it once: quantized ones by `packing`, floats by `float_packing`, on large `pages`. Products of many rows use
the processor's matrix tiles where `tiles` finds that they work. `tape` records calls and replays them as one.

To add an op: one .cpp file with an extern "C" function of a pointer to its arguments, its checked wrapper in `ops`
(outputs from `_empty`, the call through `_run`), its torch twin in `engine.kernels.reference`.
"""

from __future__ import annotations

from engine.kernels.cpu.build import library

__all__ = ["available"]


def available() -> bool:
    """Whether the compiled kernels run here. The first call may compile (seconds); a failure is logged once."""
    return library() is not None

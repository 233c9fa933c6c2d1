"""Which format stores a tensor."""

from __future__ import annotations

import torch

from engine.kernels.cpu.ops import NativeKernels
from engine.quant.base import QuantFormat
from engine.quant.gguf import Gguf
from engine.quant.none import Unquantized


def format_for(
    stored_format: str, dtype: torch.dtype, native: NativeKernels | None, weight_dtype: torch.dtype | None = None
) -> QuantFormat:
    """The format of a checkpoint tensor (StoredTensor.format: "none", or a ggml type such as "q4_1") for
    activations in `dtype`. `native`: the compiled CPU kernels to use, if any. `weight_dtype`: what float weights
    are kept and multiplied in by those, None: `dtype`; with bfloat16, activations beside weights of 4 bits may be
    rounded as coarsely too."""
    if stored_format == "none":
        return Unquantized(dtype, native, weight_dtype)
    return Gguf(stored_format, dtype, native, narrow=weight_dtype is torch.bfloat16)

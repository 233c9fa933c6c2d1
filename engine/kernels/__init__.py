"""One op per function, behind a small protocol: `reference` in torch (any device, the oracle), `fixed` the same in
shapes that do not depend on the batch, `cpu` in C++.

To add a set of kernels: a class with the methods of `base.Kernels` and one line in `base.KERNELS`, fastest first.
"""

from __future__ import annotations

import torch

from engine.kernels import cpu
from engine.kernels.base import KERNELS, Kernels
from engine.select import Machine, choose

__all__ = ["KERNELS", "Kernels", "select_kernels"]


def select_kernels(
    device: torch.device, dtype: torch.dtype, wanted: str = "auto", deterministic: bool = False
) -> Kernels:
    """The fastest kernel set that runs `dtype` activations on `device`. On the CPU the first call may compile
    (seconds). Raises ConfigError if `wanted` names one that cannot."""
    name = str(dtype).removeprefix("torch.")
    native = device.type == "cpu" and cpu.available()
    machine = Machine(device.type, name, kv_dtype=name, head_dim=0, native=native, deterministic=deterministic)
    return choose(KERNELS, machine, wanted)()

"""The attention seam. To add a backend: one file here and one line in BACKENDS; tests/contract picks it up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from engine.batch import ForwardBatch
from engine.kernels.base import Kernels
from engine.kv.storage import LayerKV
from engine.registry import Registry
from engine.select import Needs


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One attention layer's numbers. `scale` multiplies q·k. `window` None: full causal attention; else a token sees
    the last `window`, itself included, and besides the first `sinks` of its sequence. Nothing between the two may be
    read: those blocks may be another's by now. `rounded`: beside a bfloat16 cache, q and the weights of V may be
    rounded to bfloat16 too. With a `softcap` c a score s, already scaled, counts as c * tanh(s / c)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    sinks: int = 0
    rounded: bool = False
    softcap: float | None = None


class AttentionBackend(Protocol):
    """Paged causal attention. Made once per model from AttentionShape; holds no batch state. `kernels` is the
    model's kernel set: a backend that belongs to it uses that one."""

    needs: ClassVar[Needs]

    def __init__(self, shape: AttentionShape, block_size: int, kernels: Kernels | None = None) -> None: ...

    @staticmethod
    def keys_by_feature(block_size: int) -> bool:
        """Whether it wants KVLayout.keys_by_feature. It must read the usual layout as well."""

    def plan(self, batch: ForwardBatch) -> Any:
        """Called once per step: returns whatever run() wants precomputed for this batch."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, batch: ForwardBatch, meta: Any) -> Tensor:
        """Once per layer: write k, v at batch.slots, return softmax(q K^T * scale) V over each row's context, scores
        capped if the shape says so.

        q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] (rotary already applied).
        Returns [T, num_heads * head_dim]. A cache with scales is written as kv_codec.encode does it, to the bit.
        """


BACKENDS: Registry[AttentionBackend] = Registry(
    "attention backend",
    {
        "cpu_native": "engine.attention.cpu_native:CpuNative",
        "torch": "engine.attention.torch_paged:TorchPaged",
        "torch_fixed": "engine.attention.torch_fixed:TorchFixed",
    },
)

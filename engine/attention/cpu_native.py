"""Paged attention in C++ for float32 on the CPU."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from engine.attention.base import AttentionShape
from engine.batch import ForwardBatch
from engine.kernels.base import Kernels
from engine.kernels.cpu.ops import HEAD_DIM_STEP, KEY_GROUP, MAX_HEAD_DIM, NativeKernels, PagedContext, Scoring
from engine.kv.storage import LayerKV
from engine.select import Needs


class CpuNative:
    """A row's result depends only on its own context: chunks, neighbours and threads do not change a bit."""

    needs: ClassVar[Needs] = Needs(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32"}),
        kv_dtypes=frozenset({"float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"}),
        head_dims=frozenset(range(HEAD_DIM_STEP, MAX_HEAD_DIM + 1, HEAD_DIM_STEP)),
        native=True,
        invariant=True,
    )

    def __init__(self, shape: AttentionShape, block_size: int, kernels: Kernels | None = None) -> None:
        self._scoring = Scoring(shape.scale, shape.window, shape.sinks, shape.rounded, shape.softcap)
        self._kernels = kernels if isinstance(kernels, NativeKernels) else NativeKernels()

    @staticmethod
    def keys_by_feature(block_size: int) -> bool:
        """True where whole groups of keys fit a block."""
        return block_size % KEY_GROUP == 0

    def plan(self, batch: ForwardBatch) -> PagedContext:
        """See AttentionBackend.plan(). The kernel takes the batch as it is."""
        return PagedContext(batch.slots, batch.query_starts, batch.seq_lens, batch.block_table)

    def run(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, batch: ForwardBatch, meta: PagedContext) -> Tensor:
        """See AttentionBackend.run()."""
        return self._kernels.paged_attention(q, k, v, kv, meta, self._scoring)

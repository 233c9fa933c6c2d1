"""Self-attention over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionShape
from engine.kernels.base import Kernels
from engine.layers.context import ForwardContext
from engine.layers.linear import ColumnLinear, RowLinear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotary


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Project, rotate, attend, project. `shape` counts this rank's heads; `q_norm` and `k_norm` act per head."""

    index: int
    shape: AttentionShape
    qkv: ColumnLinear
    out: RowLinear
    rotary: Rotary
    backend: AttentionBackend
    kernels: Kernels
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Rows `x` [T, hidden] of the step's tokens -> [T, hidden]. Writes their keys and values into the cache."""
        heads, kv_heads, dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        qkv = self.qkv(x).view(-1, heads + 2 * kv_heads, dim)  # [T, heads, dim]
        q, k, v = qkv[:, :heads], qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        self.kernels.rope(q, k, self.rotary.cos, self.rotary.sin, ctx.batch.positions)
        return self.out(self.backend.run(q, k, v, ctx.kv[self.index], ctx.batch, ctx.metas[self.index]))

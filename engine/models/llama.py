"""The Llama family: Llama, SmolLM, Mistral, Qwen2 (q, k, v biases), Qwen3 (q and k norms), Gemma 2 and 3 (norms behind
attention and MLP too, layers of two kinds)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionShape
from engine.batch import ForwardBatch
from engine.kernels.base import Kernels
from engine.layers.attention import Attention
from engine.layers.context import KV, ForwardContext
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import rotary
from engine.models.spec import ModelSpec
from engine.models.weights import Weights


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """`attention_end` and `mlp_end`: norms of what those add to the stream."""

    input_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP
    attention_end: RMSNorm | None
    mlp_end: RMSNorm | None

    def __call__(self, x: Tensor, residual: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """(h, residual) of the layer: the residual stream is their sum, which the next norm adds up."""
        if residual is None:
            h, residual = self.input_norm(x), x
        else:
            h, residual = self.input_norm.add(x, residual)
        h = self.attention(h, ctx)
        if self.attention_end is not None:
            h = self.attention_end(h)
        h, residual = self.mlp_norm.add(h, residual)
        h = self.mlp(h)
        return h if self.mlp_end is None else self.mlp_end(h), residual


class LlamaModel:
    """See engine.models.Model."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        kernels: Kernels,
        attention: type[AttentionBackend],
        block_size: int,
        max_model_len: int,
    ) -> None:
        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights.norm(name), spec.rms_eps, kernels)

        angles = {
            rope: rotary(rope, spec.head_dim, max_model_len, weights.device) for rope in dict.fromkeys(spec.layer_ropes)
        }
        sandwich = spec.sandwich_norms
        self._kernels = kernels
        self._embedding_scale = weights.rounded_as_weights(spec.embedding_scale)
        self._logit_softcap = spec.logit_softcap
        self._backends: dict[AttentionShape, AttentionBackend] = {}
        self._layers: list[_Layer] = []
        self._embedding = weights.embedding()
        for i, (window, rope) in enumerate(zip(spec.layer_windows, spec.layer_ropes, strict=True)):
            at = f"model.layers.{i}"
            shape = AttentionShape(
                num_heads=spec.num_heads // weights.group.size,
                num_kv_heads=spec.num_kv_heads // weights.group.size,
                head_dim=spec.head_dim,
                scale=spec.attention_scale or spec.head_dim**-0.5,
                window=window if window is not None and window < max_model_len else None,
                sinks=spec.attention_sinks,
                rounded=weights.rounded,
                softcap=spec.attention_softcap,
            )
            if shape not in self._backends:
                self._backends[shape] = attention(shape, block_size, kernels)
            qkv = weights.column(*(f"{at}.self_attn.{x}_proj" for x in "qkv"))
            self._layers.append(
                _Layer(
                    input_norm=norm(f"{at}.input_layernorm"),
                    attention=Attention(
                        index=i,
                        shape=shape,
                        qkv=qkv,
                        out=weights.row(f"{at}.self_attn.o_proj"),
                        rotary=angles[rope],
                        backend=self._backends[shape],
                        kernels=kernels,
                        q_norm=norm(f"{at}.self_attn.q_norm") if spec.qk_norm else None,
                        k_norm=norm(f"{at}.self_attn.k_norm") if spec.qk_norm else None,
                    ),
                    mlp_norm=norm(f"{at}.{'pre_feedforward' if sandwich else 'post_attention'}_layernorm"),
                    mlp=GatedMLP(
                        weights.column(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"),
                        weights.row(f"{at}.mlp.down_proj"),
                        kernels,
                        spec.activation,
                    ),
                    attention_end=norm(f"{at}.post_attention_layernorm") if sandwich else None,
                    mlp_end=norm(f"{at}.post_feedforward_layernorm") if sandwich else None,
                )
            )
        self._norm = norm("model.norm")
        self._head = weights.head()

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """The kinds of attention layers, each once, in order of their first layer."""
        return tuple(self._backends)

    def forward(self, batch: ForwardBatch, kv: KV) -> Tensor:
        """See Model.forward()."""
        plans = {shape: backend.plan(batch) for shape, backend in self._backends.items()}
        ctx = ForwardContext(batch, kv, [plans[layer.attention.shape] for layer in self._layers])
        x, residual = self._embedding(batch.input_ids), None
        if self._embedding_scale != 1:
            self._kernels.scale(x, self._embedding_scale)
        for layer in self._layers:
            x, residual = layer(x, residual, ctx)
        assert residual is not None  # a spec has at least one layer
        return self._norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model.logits()."""
        logits = self._head(hidden)
        if self._logit_softcap is not None:
            self._kernels.softcap(logits, self._logit_softcap)
        return logits

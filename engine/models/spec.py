"""The numbers of a model, whatever kind of file they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.errors import ModelFileError
from engine.layers.rope_spec import RopeSpec
from engine.models.fields import Json

_AT_LEAST_1 = (
    "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size",
    "max_position",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder of the Llama family. `layer_windows` and `layer_ropes` have one entry per layer; a window is how many
    positions a token sees, itself included, or None for all; one with a window sees the first `attention_sinks` as
    well. `rotary` half: feature i turns with feature i + head_dim / 2.

    `sandwich_norms`: attention and MLP are normed behind them too. `norm_offset` is added to norm weights as stored,
    which are then used in float32; None: used as they are, in the activations' type. `attention_scale` multiplies q·k;
    None: head_dim ** -0.5. A softcap c makes c * tanh(x / c) of attention's or the head's logits x.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rms_eps: float
    layer_windows: tuple[int | None, ...]
    layer_ropes: tuple[RopeSpec, ...]
    rotary: Literal["half"] = "half"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    attention_sinks: int = 0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    sandwich_norms: bool = False
    norm_offset: float | None = None
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        for name in _AT_LEAST_1:
            if getattr(self, name) < 1:
                raise ModelFileError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ModelFileError(f"head_dim must be even, got {self.head_dim}")
        for per_layer in (self.layer_windows, self.layer_ropes):
            if len(per_layer) != self.num_layers:
                raise ModelFileError(f"{len(per_layer)} layer types for {self.num_layers} layers")
        if any(w is not None and w < 1 for w in self.layer_windows):
            raise ModelFileError(f"sliding_window must be at least 1, got {self.layer_windows}")
        for token in (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))):
            if not 0 <= token < self.vocab_size:
                raise ModelFileError(f"special token id {token} is outside the vocabulary of {self.vocab_size}")
        for rope in set(self.layer_ropes):
            if rope.freq_factors and len(rope.freq_factors) != self.head_dim // 2:
                raise ModelFileError(f"{len(rope.freq_factors)} rope factors for head_dim {self.head_dim}")
        for what, cap in (("attn", self.attention_softcap), ("final", self.logit_softcap)):
            if cap is not None and cap <= 0:
                raise ModelFileError(f"{what}_logit_softcapping must be above 0, got {cap}")

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model by canonical (Hugging Face) name. lm_head is absent when tied."""
        h, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (h,),
            "self_attn.q_proj.weight": (q, h),
            "self_attn.k_proj.weight": (kv, h),
            "self_attn.v_proj.weight": (kv, h),
            "self_attn.o_proj.weight": (h, q),
            "post_attention_layernorm.weight": (h,),
            "mlp.gate_proj.weight": (self.intermediate_size, h),
            "mlp.up_proj.weight": (self.intermediate_size, h),
            "mlp.down_proj.weight": (h, self.intermediate_size),
        }
        if self.sandwich_norms:
            layer |= {"pre_feedforward_layernorm.weight": (h,), "post_feedforward_layernorm.weight": (h,)}
        if self.qkv_bias:
            layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
        if self.qk_norm:
            layer |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, h)}
        for i in range(self.num_layers):
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (h,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, h)
        return shapes


_LLAMA_ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
_GEMMA_ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False, None),
    "use_bidirectional_attention": (False, None),
}
_GEMMA_DEFAULTS: Json = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture's name alone says. `gguf` None: its GGUF files carry another family's name.

    `defaults` are what transformers, `gguf_defaults` what GGUF readers take for a key that is left out; `must_be` are
    the values of keys beside which the decoder has no other. `full_every` n: of n layers the last sees all, the others
    have the window; None: no such pattern. `local_rope`: layers with a window have angles of their own.
    `width_scaled_at`: in a GGUF file with so many layers q·k is scaled by hidden_size / num_heads, not by head_dim.
    """

    hf: str
    gguf: str | None
    qkv_bias: bool = False
    qk_norm: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    sandwich_norms: bool = False
    scaled_embeddings: bool = False
    full_every: int | None = None
    local_rope: bool = False
    width_scaled_at: int | None = None
    defaults: Json = field(default_factory=dict)
    gguf_defaults: Json = field(default_factory=dict)
    must_be: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: _LLAMA_ONLY)


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama"),
    "mistral": Family("MistralForCausalLM", None, defaults={"sliding_window": 4096}),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", qk_norm=True, defaults={"head_dim": 128}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "gemma2",
        activation="gelu_tanh",
        sandwich_norms=True,
        scaled_embeddings=True,
        full_every=2,
        width_scaled_at=46,
        defaults={**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        gguf_defaults={
            "attention.sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        must_be={**_GEMMA_ONLY, "sliding_window_pattern": (2, None)},
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3",
        qk_norm=True,
        activation="gelu_tanh",
        sandwich_norms=True,
        scaled_embeddings=True,
        full_every=6,
        local_rope=True,
        width_scaled_at=62,
        defaults={**_GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        gguf_defaults={"rope.freq_base_swa": 1e4},
        must_be={**_GEMMA_ONLY, "attn_logit_softcapping": (None,)},
    ),
}
"""Supported architectures; to add one of this shape is to add a line."""

"""The numbers of a model, whatever kind of file they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from engine.errors import ModelFileError
from engine.models.gguf_file import GgufTensor

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary angles. inv_freq[i] = theta ** (-2i / head_dim), changed by `scaling`:

    none; linear: / factor; llama3: the wavelength-dependent interpolation of Llama 3.1; yarn: NTK by parts,
    with cos and sin multiplied by `attention_factor`; table: / freq_factors[i] (GGUF's form of llama3).
    """

    theta: float = 10000.0
    scaling: Literal["none", "linear", "llama3", "yarn", "table"] = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1 * ln(factor) + 1
    freq_factors: tuple[float, ...] = ()  # [head_dim / 2]


_AT_LEAST_1 = (
    "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size",
    "max_position",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder of the Llama family. `layer_windows` has one entry per layer: how many positions a token
    sees, itself included, or None for all; one with a window sees the first `attention_sinks` as well.
    `rotary` half: feature i turns with feature i + head_dim / 2."""

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
    rope: RopeSpec = RopeSpec()
    rotary: Literal["half"] = "half"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    attention_sinks: int = 0

    def __post_init__(self) -> None:
        for name in _AT_LEAST_1:
            if getattr(self, name) < 1:
                raise ModelFileError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ModelFileError(f"head_dim must be even, got {self.head_dim}")
        if len(self.layer_windows) != self.num_layers:
            raise ModelFileError(f"{len(self.layer_windows)} layer types for {self.num_layers} layers")
        if any(w is not None and w < 1 for w in self.layer_windows):
            raise ModelFileError(f"sliding_window must be at least 1, got {self.layer_windows}")
        for token in (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))):
            if not 0 <= token < self.vocab_size:
                raise ModelFileError(f"special token id {token} is outside the vocabulary of {self.vocab_size}")
        if self.rope.freq_factors and len(self.rope.freq_factors) != self.head_dim // 2:
            raise ModelFileError(f"{len(self.rope.freq_factors)} rope factors for head_dim {self.head_dim}")

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


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture's name alone says. `gguf` None: its GGUF files carry another family's name."""

    hf: str
    gguf: str | None
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # when the config names none; None: hidden_size / num_heads


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama"),
    "mistral": Family("MistralForCausalLM", None),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", qk_norm=True, head_dim=128),
}
"""Supported architectures; to add one of this shape is to add a line."""

# Features that some configs of these architectures switch on and the decoder does not have.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
}


def from_hf(config: Json, generation: Json) -> ModelSpec:
    """From config.json and generation_config.json ({} when there is none). Raises ModelFileError."""
    names = config.get("architectures") or ["none named"]
    name = next((k for k, f in FAMILIES.items() if f.hf == names[0]), None)
    if name is None:
        raise ModelFileError(
            f"architecture {names[0]!r} is not supported; supported: {', '.join(f.hf for f in FAMILIES.values())}"
        )
    family = FAMILIES[name]
    for key, allowed in _MUST_BE.items():
        if key in config and config[key] not in allowed:
            raise ModelFileError(f"config {key} {config[key]!r} is not supported for {names[0]} (only {allowed[0]!r})")
    num_heads, hidden = _get(config, "num_attention_heads", int), _get(config, "hidden_size", int)
    num_layers = _get(config, "num_hidden_layers", int)
    max_position = _get(config, "max_position_embeddings", int)
    eos = [*_ids(generation, "eos_token_id"), *_ids(config, "eos_token_id")]
    return ModelSpec(
        architecture=name,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=_get(config, "num_key_value_heads", int, num_heads),
        head_dim=_get(config, "head_dim", int, family.head_dim or _divide(hidden, num_heads)),
        intermediate_size=_get(config, "intermediate_size", int),
        vocab_size=_get(config, "vocab_size", int),
        max_position=max_position,
        rms_eps=_get(config, "rms_norm_eps", float, 1e-6),
        layer_windows=_windows_hf(config, name, num_layers),
        rope=_rope_hf(config, max_position),
        tie_embeddings=_get(config, "tie_word_embeddings", bool, False),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        eos_ids=tuple(dict.fromkeys(eos)),
        bos_id=next(iter(_ids(config, "bos_token_id")), None),
    )


def _windows_hf(config: Json, name: str, num_layers: int) -> tuple[int | None, ...]:
    window = _maybe(config, "sliding_window", int)
    if name == "llama" or window is None or (name.startswith("qwen") and not config.get("use_sliding_window", False)):
        return (None,) * num_layers
    if name == "mistral":
        return (window,) * num_layers
    types = config.get("layer_types")
    if types is None:
        first = _get(config, "max_window_layers", int, 28)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if unknown := set(types) - {"sliding_attention", "full_attention"}:
        raise ModelFileError(f"config layer_types: {sorted(unknown)[0]!r} is not supported")
    return tuple(window if t == "sliding_attention" else None for t in types)


def _rope_hf(config: Json, max_position: int) -> RopeSpec:
    """transformers 5 writes rope_parameters; before, rope_theta and rope_scaling stood apart."""
    params: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = _get(params, "rope_theta", float, _get(config, "rope_theta", float, 10000.0))
    kind = params.get("rope_type", params.get("type", "default"))
    if params.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelFileError("config partial_rotary_factor is not supported")
    if kind == "default":
        return RopeSpec(theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelFileError(f"config rope_type {kind!r} is not supported; supported: default, linear, llama3, yarn")
    original = _get(config, "original_max_position_embeddings", int, max_position)
    return RopeSpec(
        theta,
        kind,
        factor=_get(params, "factor", float),
        original_max_position=_get(params, "original_max_position_embeddings", int, original),
        low_freq_factor=_get(params, "low_freq_factor", float, 1.0),
        high_freq_factor=_get(params, "high_freq_factor", float, 4.0),
        beta_fast=_get(params, "beta_fast", float, 32.0),
        beta_slow=_get(params, "beta_slow", float, 1.0),
        attention_factor=_maybe(params, "attention_factor", float),
    )


def from_gguf(metadata: Json, tensors: Mapping[str, GgufTensor], rope_factors: tuple[float, ...] = ()) -> ModelSpec:
    """From a GGUF file's metadata and tensor list. `rope_factors`: the values of its rope_freqs tensor.

    Raises ModelFileError, also when token list, declared vocabulary and embedding rows disagree.
    """
    arch = _get(metadata, "general.architecture", str)
    known = {f.gguf: f for f in FAMILIES.values() if f.gguf}
    if arch not in known:
        raise ModelFileError(f"architecture {arch!r} is not supported; supported in GGUF: {', '.join(known)}")
    m = {k.removeprefix(f"{arch}."): v for k, v in metadata.items() if k.startswith(f"{arch}.")}
    if m.get("expert_count", 0):
        raise ModelFileError(f"{arch} with {m['expert_count']} experts is not supported")
    hidden, num_heads = _get(m, "embedding_length", int), _get(m, "attention.head_count", int)
    head_dim = _get(m, "attention.key_length", int, _divide(hidden, num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (got := _get(m, key, int, head_dim)) != head_dim:
            raise ModelFileError(f"{arch}.{key} is {got}, only the head dimension {head_dim} is supported")
    num_layers = _get(m, "block_count", int)
    window = _maybe(m, "attention.sliding_window", int) or None
    special = [_maybe(metadata, f"tokenizer.ggml.{k}_token_id", int) for k in ("eos", "eot", "eom")]
    return ModelSpec(
        architecture=arch,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=_get(m, "attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        intermediate_size=_get(m, "feed_forward_length", int),
        vocab_size=_vocab_gguf(metadata, m, tensors),
        max_position=_get(m, "context_length", int),
        rms_eps=_get(m, "attention.layer_norm_rms_epsilon", float),
        layer_windows=(window,) * num_layers,
        rope=_rope_gguf(m, rope_factors),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm=known[arch].qk_norm,
        eos_ids=tuple(dict.fromkeys(t for t in special if t is not None)),
        bos_id=_maybe(metadata, "tokenizer.ggml.bos_token_id", int),
    )


def _vocab_gguf(metadata: Json, m: Json, tensors: Mapping[str, GgufTensor]) -> int:
    if "token_embd.weight" not in tensors:
        raise ModelFileError("tensor 'token_embd.weight' is missing")
    rows = tensors["token_embd.weight"].shape[0]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise ModelFileError("key 'tokenizer.ggml.tokens' is missing or no list")
    for what, count in (
        ("tokenizer.ggml.tokens", len(tokens)),
        ("tokenizer.ggml.token_type", len(metadata.get("tokenizer.ggml.token_type", tokens))),
        ("tokenizer.ggml.scores", len(metadata.get("tokenizer.ggml.scores", tokens))),
        ("vocab_size", _get(m, "vocab_size", int, rows)),
    ):
        if count != rows:
            raise ModelFileError(f"key {what!r} says {count} tokens, but 'token_embd.weight' has {rows} rows")
    return rows


def _rope_gguf(m: Json, rope_factors: tuple[float, ...]) -> RopeSpec:
    theta = _get(m, "rope.freq_base", float, 10000.0)
    kind = m.get("rope.scaling.type", "none")
    if rope_factors:
        if kind != "none":
            raise ModelFileError(f"rope.scaling.type {kind!r} together with a rope_freqs tensor is not supported")
        return RopeSpec(theta, "table", freq_factors=rope_factors)
    if kind == "none":
        return RopeSpec(theta)
    if kind not in ("linear", "yarn"):
        raise ModelFileError(f"rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn")
    return RopeSpec(
        theta,
        kind,
        factor=_get(m, "rope.scaling.factor", float),
        original_max_position=_get(m, "rope.scaling.original_context_length", int, _get(m, "context_length", int)),
    )


def _divide(hidden: int, num_heads: int) -> int:
    return hidden // num_heads if num_heads > 0 and hidden % num_heads == 0 else 0


V = TypeVar("V", int, float, bool, str)


def _get(values: Json, key: str, kind: type[V], default: V | None = None) -> V:
    """values[key] as `kind`, or `default`. A wrong type is an error, not a conversion, except that an integer
    may stand for a float. Raises ModelFileError when absent or null without a default."""
    value = _maybe(values, key, kind)
    if value is None:
        value = default
    if value is None:
        raise ModelFileError(f"key {key!r} is missing")
    return value


def _maybe(values: Json, key: str, kind: type[V]) -> V | None:
    value = values.get(key)
    if value is None:
        return None
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ModelFileError(f"key {key!r} must be {kind.__name__}, got {value!r:.80}")
    return kind(value)


def _ids(values: Json, key: str) -> list[int]:
    """Token ids given as one, several or none."""
    value = values.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int for i in ids):
        raise ModelFileError(f"key {key!r} must be token ids, got {value!r:.80}")
    return ids

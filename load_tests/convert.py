"""Any model the engine reads -> a Hugging Face directory, for engines that read only that."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.models.checkpoint import Checkpoint, open_checkpoint
from engine.models.locate import resolve
from engine.models.spec import ModelSpec
from engine.text import load_text

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def hf_config(spec: ModelSpec, dtype: torch.dtype) -> dict[str, object]:
    return {
        "architectures": [_CLASSES[spec.architecture]],
        "model_type": spec.architecture,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.rms_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tie_embeddings,
        "hidden_act": "silu",
        "bos_token_id": spec.bos_id,
        "eos_token_id": sorted(spec.eos_ids),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def state_dict(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor dequantized, under its Hugging Face name."""
    return {name: checkpoint.load(name).to_float().to(dtype).contiguous() for name in checkpoint.names()}


def convert(model: str, out: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Writes config.json, model.safetensors and the tokenizer into `out` (made if absent). Returns `out`."""
    path = resolve(model)
    checkpoint = open_checkpoint(path)
    out.mkdir(parents=True, exist_ok=True)
    save_file(state_dict(checkpoint, dtype), out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(hf_config(checkpoint.spec, dtype), indent=1))
    text = load_text(str(path))
    text.tokenizer.save(out / "tokenizer.json")
    template = text.chat_template.source if text.chat_template else None
    (out / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}, indent=1)
    )
    return out


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m load_tests.convert MODEL OUT_DIR")
    print(convert(sys.argv[1], Path(sys.argv[2])))

"""Any model the engine reads -> a Hugging Face directory, for engines that read only that."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, processors

from engine.errors import EngineError
from engine.models.checkpoint import Checkpoint, open_checkpoint
from engine.models.locate import resolve
from engine.models.spec import FAMILIES, ModelSpec
from engine.quant.gguf_codecs import to_float
from engine.text.tokenizer import Tokenizer, read_vocabulary
from engine.text.vocabulary import Vocabulary
from load_tests.errors import LoadError


def hf_config(spec: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
    """Raises LoadError for what this writer does not spell: sliding windows, scaled rope and Gemma."""
    rope = spec.layer_ropes[0]
    if rope.scaling != "none" or any(w is not None for w in spec.layer_windows) or spec.sandwich_norms:
        raise LoadError(f"only plain rope and full attention can be converted, not {rope.scaling!r}, windows or Gemma")
    return {
        "architectures": [FAMILIES[spec.architecture].hf],
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
        "rope_theta": rope.theta,
        "tie_word_embeddings": spec.tie_embeddings,
        "hidden_act": "silu",
        "bos_token_id": spec.bos_id,
        "eos_token_id": sorted(spec.eos_ids),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def state_dict(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor dequantized, under its Hugging Face name."""
    stored = (checkpoint.load(name) for name in checkpoint.names())
    floats = {t.name: t.data if t.format == "none" else to_float(t.format, t.data) for t in stored}
    return {name: tensor.to(dtype).contiguous() for name, tensor in floats.items()}


def backend_of(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Complete for other readers, which decode and add BOS through it: our own reader of GGUF leaves those parts out.
    The vocabulary's own backend is left as it is."""
    backend = tokenizers.Tokenizer.from_str(vocabulary.backend.to_str())
    if backend.decoder is None:
        if backend.pre_tokenizer is not None:
            backend.decoder = decoders.ByteLevel()
        else:  # SentencePiece
            spaces = decoders.Replace("\u2581", " ")
            parts = [spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            backend.decoder = decoders.Sequence(parts)
    if backend.post_processor is None and vocabulary.add_bos and vocabulary.bos_id is not None:
        bos = backend.id_to_token(vocabulary.bos_id)
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, vocabulary.bos_id)])
    return backend


def tokenizer_config(vocabulary: Vocabulary, max_position: int) -> dict[str, Any]:
    tokenizer = Tokenizer(vocabulary)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token or None,
        "eos_token": tokenizer.eos_token or None,
        "pad_token": tokenizer.eos_token or None,
        "add_bos_token": tokenizer.add_bos,
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
        "chat_template": vocabulary.chat_template,
    }
    return {key: value for key, value in config.items() if value is not None}


def convert(model: str, out: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Writes config, weights and tokenizer into `out` (made if absent). Returns it. Raises EngineError, LoadError."""
    path = resolve(model)
    checkpoint = open_checkpoint(path)
    spec, vocabulary = checkpoint.spec, read_vocabulary(path)
    config = hf_config(spec, dtype)
    out.mkdir(parents=True, exist_ok=True)
    save_file(state_dict(checkpoint, dtype), out / "model.safetensors", metadata={"format": "pt"})
    backend_of(vocabulary).save(str(out / "tokenizer.json"))
    eos_ids = sorted({*spec.eos_ids, *vocabulary.eos_ids})
    for name, content in {
        "tokenizer_config.json": tokenizer_config(vocabulary, spec.max_position),
        "generation_config.json": {"bos_token_id": spec.bos_id, "eos_token_id": eos_ids, "pad_token_id": eos_ids[0]},
        "config.json": config,
    }.items():
        (out / name).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    return out


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python -m load_tests.convert MODEL OUT_DIR")
    try:
        print(convert(sys.argv[1], Path(sys.argv[2])))
    except (EngineError, LoadError) as error:
        sys.exit(f"convert: {error}")


if __name__ == "__main__":
    main()

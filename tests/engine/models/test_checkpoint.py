from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from helpers_models import ARCHS, demo_gguf, edit_config, hf_model, make_gguf, make_hf_dir
from safetensors.torch import load_file, save_file

from engine.errors import ModelFileError
from engine.models.checkpoint import canonical_name, open_checkpoint
from engine.quant import gguf_codecs


@pytest.mark.parametrize("arch", ARCHS)
def test_hf_directory_gives_the_models_tensors(tmp_path: Path, arch: str) -> None:
    checkpoint = open_checkpoint(make_hf_dir(tmp_path, arch))
    want = dict(hf_model(arch).named_parameters())  # which has no tied head
    assert set(checkpoint.names()) == want.keys()
    for name, tensor in want.items():
        stored = checkpoint.load(name)
        assert (stored.name, stored.format, stored.shape) == (name, "none", tuple(tensor.shape))
        assert torch.equal(stored.data, tensor)


@pytest.mark.parametrize("arch", ARCHS)
def test_float_gguf_gives_the_same_tensors_as_the_hf_directory(tmp_path: Path, arch: str) -> None:
    """Names mapped, q and k rows (and nothing else) put back in order. Gemmas' norms are stored with 1 added."""
    checkpoint = open_checkpoint(make_gguf(tmp_path, arch, quant="F32", embed_quant="F32"))
    for name, tensor in hf_model(arch).named_parameters():
        stored = checkpoint.load(name)
        assert stored.format == "none"
        offset = 1 if arch.startswith("gemma") and name.endswith("norm.weight") else 0
        assert torch.equal(stored.data, tensor + offset), name


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_quantized_gguf_is_the_quantized_model(tmp_path: Path, quant: str) -> None:
    checkpoint = open_checkpoint(make_gguf(tmp_path, "llama", quant=quant))
    for name, tensor in hf_model("llama").state_dict().items():
        stored = checkpoint.load(name)
        kind = "F32" if tensor.dim() == 1 else "Q8_0" if "embed" in name else quant
        qtype = gguf.GGMLQuantizationType[kind]
        want = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), qtype), qtype)
        if kind in ("F32", "F16", "BF16"):
            assert stored.format == "none"
            got = stored.data.float()
        else:
            assert stored.format == kind.lower()
            assert stored.data.shape[:2] == (tensor.shape[0], tensor.shape[1] // 32)
            got = gguf_codecs.to_float(stored.format, stored.data)
        assert stored.shape == tuple(tensor.shape)
        assert torch.equal(got, torch.from_numpy(want)), name


def test_tied_head_is_absent(tmp_path: Path) -> None:
    for path in (make_gguf(tmp_path, tie_word_embeddings=True), make_hf_dir(tmp_path, tie_word_embeddings=True)):
        checkpoint = open_checkpoint(path)
        assert checkpoint.spec.tie_embeddings
        assert "lm_head.weight" not in checkpoint.names()
        with pytest.raises(ModelFileError, match="lm_head"):
            checkpoint.load("lm_head.weight")


def test_demo_model() -> None:
    checkpoint = open_checkpoint(demo_gguf())
    assert len(checkpoint.names()) == 272
    assert checkpoint.spec.tie_embeddings
    embed = checkpoint.load("model.embed_tokens.weight")
    assert (embed.format, tuple(embed.data.shape), embed.shape) == ("q8_0", (49152, 18, 34), (49152, 576))
    q = checkpoint.load("model.layers.7.self_attn.q_proj.weight")
    assert (q.format, tuple(q.data.shape)) == ("q4_1", (576, 18, 20))


def test_canonical_names() -> None:
    assert canonical_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert canonical_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert canonical_name("output.weight") == "lm_head.weight"
    assert canonical_name("blk.3.ffn_norm.weight") == "model.layers.3.post_attention_layernorm.weight"
    gemma = (
        ("post_attention_norm", "post_attention"),
        ("ffn_norm", "pre_feedforward"),
        ("post_ffw_norm", "post_feedforward"),
    )
    for short, name in gemma:
        canonical = f"model.layers.3.{name}_layernorm.weight"
        assert canonical_name(f"blk.3.{short}.weight", sandwich_norms=True) == canonical
    for unknown in ("output", "blk.3.ssm_a.weight", "token_embd.weight.extra"):
        assert canonical_name(unknown) == unknown


def refused(path: Path, *words: str) -> None:
    with pytest.raises(ModelFileError) as e:
        open_checkpoint(path)
    for word in words:
        assert word in str(e.value)


def test_gguf_without_a_needed_tensor(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, drop=("blk.1.ffn_up.weight",))
    refused(path, str(path), "'model.layers.1.mlp.up_proj.weight'", "missing")


def test_gguf_whose_tokens_and_embedding_disagree(tmp_path: Path) -> None:
    for num in (287, 290):
        path = make_gguf(tmp_path, num_tokens=num)
        refused(path, str(path), str(num), "token_embd.weight", "288")


def test_gguf_whose_numbers_contradict_its_tensors(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, metadata={"llama.attention.head_count_kv": 4})
    refused(path, "k_proj", "[64, 64]", "[128, 64]")
    path = make_gguf(tmp_path, metadata={"llama.block_count": 3})
    refused(path, "'model.layers.2.", "missing")


def save_with(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_hf_directory_with_wrong_tensors(tmp_path: Path) -> None:
    path = make_hf_dir(tmp_path)
    save_with(path, lambda t: t.pop("model.layers.0.mlp.up_proj.weight"))
    refused(path, str(path), "'model.layers.0.mlp.up_proj.weight'", "missing")

    path = make_hf_dir(tmp_path)
    save_with(path, lambda t: t.update({"model.norm.weight": torch.ones(63)}))
    refused(path, "model.safetensors", "'model.norm.weight'", "[63]", "[64]")

    path = make_hf_dir(tmp_path)
    save_with(path, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}))
    refused(path, "'model.norm.weight'", "I32")

    path = make_hf_dir(tmp_path)
    save_with(path, lambda t: t.pop("lm_head.weight"))
    refused(path, "'lm_head.weight'", "missing")
    edit_config(path, tie_word_embeddings=True)
    assert "lm_head.weight" not in open_checkpoint(path).names()

    path = make_hf_dir(tmp_path)
    save_with(path, lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(64)}))
    refused(path, "'model.layers.0.self_attn.o_proj.bias'", "bias")

    path = make_hf_dir(tmp_path)
    edit_config(path, vocab_size=289)
    refused(path, "model.embed_tokens.weight", "[288, 64]", "[289, 64]")


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_norm.weight", "base.model.layers.0.self_attn.q_proj.lora_A.weight"]
)
def test_a_tensor_of_another_model_is_refused(tmp_path: Path, name: str) -> None:
    path = make_hf_dir(tmp_path)
    save_with(path, lambda t: t.update({name: torch.ones(32)}))
    refused(path, "model.safetensors", name, "another model")


def test_old_files_frequencies_are_not_another_model(tmp_path: Path) -> None:
    path = make_hf_dir(tmp_path)
    save_with(path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}))
    open_checkpoint(path)


def test_one_part_of_a_split_gguf(tmp_path: Path) -> None:
    refused(make_gguf(tmp_path, metadata={"split.count": 3}), "one of 3 parts", "gguf-split --merge")


def test_extra_tensor_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_hf_dir(tmp_path)
    save_with(path, lambda t: t.update({"model.surprise": torch.ones(3)}))
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(path)
    assert "'model.surprise'" in caplog.text
    assert "model.surprise" not in checkpoint.names()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_norm_weight_that_is_not_finite(tmp_path: Path, value: float) -> None:
    path = make_hf_dir(tmp_path)
    name = "model.layers.1.input_layernorm.weight"
    save_with(path, lambda t: t[name].__setitem__(5, value))
    checkpoint = open_checkpoint(path)
    with pytest.raises(ModelFileError, match=name):
        checkpoint.load(name)
    checkpoint.load("model.norm.weight")


def test_other_refusals(tmp_path: Path) -> None:
    path = make_hf_dir(tmp_path)
    edit_config(path, quantization_config={"quant_method": "gptq", "bits": 4})
    refused(path, "config.json", "'gptq'")
    edit_config(path, quantization_config=None, architectures=["BertModel"])
    refused(path, "config.json", "'BertModel'", "LlamaForCausalLM")
    (path / "config.json").unlink()
    refused(path, "config.json")
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"x")
    refused(weights, str(weights), ".gguf")


def test_rope_factors_of_a_gguf_file(tmp_path: Path) -> None:
    path = make_gguf(tmp_path)
    plain = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "factors.gguf", "llama")
    for key, field in plain.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and field.contents() != []:
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    for t in plain.tensors:
        writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    factors = torch.linspace(1, 8, 16)
    writer.add_tensor("rope_freqs.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    rope = open_checkpoint(tmp_path / "factors.gguf").spec.layer_ropes[0]
    assert (rope.scaling, rope.freq_factors) == ("table", tuple(factors.tolist()))


def test_fingerprint_follows_content(tmp_path: Path) -> None:
    path = make_hf_dir(tmp_path)
    first = open_checkpoint(path).fingerprint
    assert open_checkpoint(path).fingerprint == first
    stat = (path / "model.safetensors").stat()
    os.utime(path / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    second = open_checkpoint(path).fingerprint
    assert second != first
    config = json.loads((path / "config.json").read_text())
    edit_config(path, rope_parameters={**config["rope_parameters"], "rope_theta": 20000.0})
    assert open_checkpoint(path).fingerprint not in (first, second)
    file = make_gguf(tmp_path)
    assert open_checkpoint(file).fingerprint == open_checkpoint(file).fingerprint != first

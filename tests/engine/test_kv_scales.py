"""Scales of the K/V cache from the checkpoint and from a file, through the whole engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import edit_config, make_gguf, make_hf_dir
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, ModelFileError
from engine.executor.local import LocalExecutor
from engine.kv.scales import KVScales, read_scales, write_scales
from engine.kv.storage import KVLayout, KVStorage
from engine.models.checkpoint import open_checkpoint
from engine.types import SamplingParams

torch.set_num_threads(1)
PROMPTS = [list(range(5, 60)), list(range(100, 121))]
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return str(make_gguf(tmp_path))


def with_scales(tmp_path: Path, name: str = "self_attn.{}_scale", drop: str = "", **values: Any) -> Path:
    """A checkpoint of two layers whose scales are 0.01 and 0.02 for K, 0.03 and 0.04 for V."""
    path = make_hf_dir(tmp_path)
    tensors = load_file(path / "model.safetensors")
    numbers = iter((0.01, 0.02, 0.03, 0.04))
    for kind in "kv":
        for layer in range(2):
            tensors[f"model.layers.{layer}.{name.format(kind)}"] = torch.tensor([next(numbers)])
    tensors.pop(drop, None)
    save_file(tensors | values, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize(
    "name", ["self_attn.{}_scale", "attn.{}_scale", "self_attn.attn.{}_scale", "self_attn.{0}_proj.{0}_scale"]
)
def test_found_by_the_names_that_checkpoints_use(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    scales = open_checkpoint(with_scales(tmp_path, name)).kv_scales()
    assert scales.keys == pytest.approx((0.01 * 448, 0.02 * 448))
    assert scales.values == pytest.approx((0.03 * 448, 0.04 * 448))
    assert not caplog.records, "they are not foreign tensors"


def test_the_scheme_of_compressed_tensors(tmp_path: Path) -> None:
    path = with_scales(tmp_path)
    quant = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
    edit_config(path, quantization_config=quant)
    assert open_checkpoint(path).kv_scales().keys[0] == pytest.approx(0.01 * 448)
    edit_config(path, quantization_config={**quant, "kv_cache_scheme": {**SCHEME, "type": "int"}})
    assert open_checkpoint(path).kv_scales().keys[0] == pytest.approx(0.01 * 127)
    edit_config(path, quantization_config={**quant, "kv_cache_scheme": {**SCHEME, "strategy": "channel"}})
    with pytest.raises(ModelFileError, match=r"kv_cache_scheme.strategy must be tensor, got 'channel'"):
        open_checkpoint(path)
    edit_config(path, quantization_config={**quant, "config_groups": {"group_0": {}}})
    with pytest.raises(ModelFileError, match="quantization method 'compressed-tensors' is not supported"):
        open_checkpoint(path)


def test_what_is_missing_or_no_scale_is_named(tmp_path: Path) -> None:
    path = with_scales(tmp_path, drop="model.layers.1.self_attn.v_scale")
    with pytest.raises(ModelFileError, match=r"layer 1 has no scale for V: none of model.layers.1.self_attn.v_scale"):
        open_checkpoint(path).kv_scales()
    for bad in (torch.tensor([0.0]), torch.tensor([float("nan")]), torch.ones(2)):
        path = with_scales(tmp_path, **{"model.layers.0.self_attn.k_scale": bad})
        with pytest.raises(ModelFileError, match=r"'model.layers.0.self_attn.k_scale' must be one number above 0"):
            open_checkpoint(path).kv_scales()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "is not a file of scales"),
        ('{"largest": {"k": [1, 2]}}', "is not a file of scales"),
        ('{"largest": {"k": [1, 2, 3], "v": [1, 2]}}', "largest.k has 3 entries, the model has 2 layers"),
        ('{"largest": {"k": [1, 2], "v": [1, -2]}}', r"largest.v\[1\] must be a number above 0, got -2"),
        ('{"largest": {"k": [1, 2], "v": [NaN, 2]}}', r"largest.v\[0\] must be a number above 0, got nan"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "scales.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_scales(file, 2)
    with pytest.raises(ConfigError, match="kv_scales must be dynamic, checkpoint or a file"):
        read_scales(tmp_path / "absent", 2)


def test_files_are_read_as_written(tmp_path: Path) -> None:
    write_scales(tmp_path / "s", [1.5, 2.0], [0.25, 3.0])
    assert read_scales(tmp_path / "s", 2) == KVScales((1.5, 2.0), (0.25, 3.0))
    assert json.loads((tmp_path / "s").read_text())["largest"]["v"] == [0.25, 3.0]


def test_given_scales_take_no_memory() -> None:
    given = KVLayout(2, 2, 32, 16, torch.int8, scales=KVScales((1.0, 2.0), (3.0, 4.0)))
    dynamic = KVLayout(2, 2, 32, 16, torch.int8)
    assert dynamic.bytes_per_block - given.bytes_per_block == 2 * 2 * 2 * 16 * 2
    storage = KVStorage(given, 5, torch.device("cpu"))
    assert sum(t.untyped_storage().nbytes() for layer in storage.by_block for t in layer) == 5 * given.bytes_per_block
    assert all(len(layer) == 2 for layer in storage.by_block)


def engine(path: Path, tokenizer: str, **settings: Any) -> Engine:
    always = {"num_kv_blocks": 16, "num_threads": 1, "device": "cpu", "max_decode_slowdown": float("inf")}
    return Engine(EngineConfig(model=str(path), tokenizer=tokenizer, **always | settings))


def ids(of: Engine) -> list[tuple[int, ...]]:
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    return [done.choices[0].token_ids for done in of.generate(PROMPTS, [greedy] * len(PROMPTS))]


def scores(of: Engine) -> torch.Tensor:
    """The logprob of each token of a prompt."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    done = of.generate([PROMPTS[0]], [params])[0]
    return torch.tensor([entry.logprob for entry in done.prompt_logprobs if entry is not None])


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_calibrated_scales_serve_like_dynamic_ones_and_move_with_blocks(
    tmp_path: Path, tokenizer: str, dtype: str
) -> None:
    path = make_hf_dir(tmp_path)
    wide_config = EngineConfig(
        model=str(path), tokenizer=tokenizer, device="cpu", num_kv_blocks=16, num_threads=1, kv_cache_dtype="float32"
    )
    executor = LocalExecutor(wide_config)
    wide = Engine(wide_config, executor=executor)
    want = scores(wide)
    layers = executor.rank.runner.storage.layers
    write_scales(tmp_path / "s.json", *([float(layer[i].abs().max()) for layer in layers] for i in range(2)))
    wide.close()
    dynamic = engine(path, tokenizer, kv_cache_dtype=dtype)
    settings = {"kv_cache_dtype": dtype, "kv_scales": str(tmp_path / "s.json")}
    calibrated = engine(path, tokenizer, **settings)
    off, allowed = (float((scores(of) - want).abs().mean()) for of in (calibrated, dynamic))
    assert 0 < off < 2 * allowed
    assert dynamic.capacity.fingerprint != calibrated.capacity.fingerprint, "their blocks are not each other's"
    got = ids(calibrated)
    swapping = engine(path, tokenizer, **settings, preemption_mode="swap", host_kv_cache_gib=0.001, num_kv_blocks=8)
    assert ids(swapping) == got
    assert swapping.stats().num_swaps > 0
    other = engine(path, tokenizer, **settings)
    blocks = calibrated.transfer().export_prefix(PROMPTS[0])
    assert other.transfer().import_prefix(blocks) == len(PROMPTS[0]) // 16
    assert ids(other) == got
    for one in (calibrated, swapping, other, dynamic):
        one.close()


def test_the_checkpoints_scales_are_what_the_cache_is_written_with(tmp_path: Path, tokenizer: str) -> None:
    path = with_scales(tmp_path)
    executor = LocalExecutor(
        EngineConfig(model=str(path), device="cpu", num_kv_blocks=16, kv_cache_dtype="fp8_e4m3", kv_scales="checkpoint")
    )
    executor.start()
    scales = [[float(t[0, 0, 0]) for t in layer[2:]] for layer in executor.rank.runner.storage.layers]
    assert scales == [pytest.approx([0.01, 0.03], rel=2**-8), pytest.approx([0.02, 0.04], rel=2**-8)]
    executor.shutdown()


def test_scales_need_a_narrow_cache(tmp_path: Path, tokenizer: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_scales 'checkpoint' needs kv_cache_dtype .* got float32"):
        engine(make_hf_dir(tmp_path), tokenizer, kv_scales="checkpoint")

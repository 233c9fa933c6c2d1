"""Narrow caches: how many blocks fit, and that a block is moved whole, with its scales."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers_models import make_gguf

from engine.attention.kv_codec import LARGEST
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.kv.storage import KVLayout, KVStorage, size_cache
from engine.runner.copies import block_parts, gather, make_copies, scatter
from engine.types import SamplingParams

CPU = torch.device("cpu")
NAMES = ("fp8_e4m3", "fp8_e5m2", "int8")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_same_memory_holds_almost_twice_the_blocks_of_float16(dtype, head_dim):
    layout = KVLayout(30, 3, head_dim, 16, torch.float16)
    narrow = replace(layout, dtype=dtype)
    config = EngineConfig(model="m", kv_cache_memory=1 << 28)
    wide_blocks, blocks = (size_cache(config, x, 512, CPU).num_blocks for x in (layout, narrow))
    assert blocks / wide_blocks == pytest.approx(2 * head_dim / (head_dim + 2), rel=2e-3)  # 1.94, 1.97
    storage = KVStorage(replace(narrow, num_layers=2), 3, CPU)
    tensors = [t for layer in storage.layers for t in layer]
    assert sum(t.nbytes for t in tensors) == 3 * storage.layout.bytes_per_block and len(tensors) == 8


def filled(dtype: torch.dtype, by_feature: bool) -> KVStorage:
    storage = KVStorage(KVLayout(3, 2, 6, 4, dtype, by_feature), 10, CPU)
    for layer in storage.layers:
        for tensor in layer:
            tensor.copy_(torch.randn(tensor.shape) * 50)
    return storage


def content(storage: KVStorage, block: int) -> bytes:
    parts = [t[block].contiguous().view(torch.uint8).numpy().tobytes() for layer in storage.layers for t in layer]
    return b"".join(parts)


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("by_feature", [False, True])
def test_host_memory_takes_codes_and_scales(dtype, by_feature):
    storage = filled(dtype, by_feature)
    before = [content(storage, block) for block in range(10)]
    copies = make_copies(storage, 4)
    copies.run(((7, 2), (3, 1)), ())
    copies.run((), ((1, 0), (2, 9)))
    assert content(storage, 0) == before[3] and content(storage, 9) == before[7]
    parts = block_parts(storage, torch.uint8)
    scatter(parts, torch.tensor([5]), gather(parts, torch.tensor([8])))
    assert content(storage, 5) == before[8]


def engine(path, **settings) -> Engine:
    defaults = {"num_kv_blocks": 64, "num_threads": 1, "max_num_batched_tokens": 24}
    return Engine(EngineConfig(model=str(path), **defaults | settings))


def ids(eng: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [done.choices[0].token_ids for done in eng.generate(prompts, [GREEDY] * len(prompts))]


PROMPTS = [[(7 * i + 13 * j) % 250 + 3 for j in range(40 + i)] for i in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_gguf(tmp_path_factory.mktemp("m"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_prefix_cached_elsewhere_gives_the_same_ids(model, name, backend):
    first, second = (engine(model, kv_cache_dtype=name, attention_backend=backend) for _ in range(2))
    want = ids(first, PROMPTS)
    for prompt in PROMPTS:
        assert second.transfer().import_prefix(first.transfer().export_prefix(prompt)) == 2
    assert ids(second, PROMPTS) == want


@pytest.mark.parametrize("name", NAMES)
def test_swapping_does_not_change_ids(model, name):
    want = ids(engine(model, kv_cache_dtype=name), PROMPTS)
    small = engine(model, kv_cache_dtype=name, num_kv_blocks=7, preemption_mode="swap", host_kv_cache_gib=0.01)
    assert ids(small, PROMPTS) == want


def test_an_unknown_format_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be one of .*fp8_e4m3, fp8_e5m2, int8, got 'int4'"):
        EngineConfig(model="m", kv_cache_dtype="int4")

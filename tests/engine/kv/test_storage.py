"""Sizes of the K/V tensors."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.storage import DEFAULT_CPU_BYTES, KVLayout, KVStorage, num_blocks_for

CPU = torch.device("cpu")
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=16, dtype=torch.bfloat16)
BLOCK_BYTES = 2 * 3 * 16 * 2 * 8 * 2


def _blocks(max_model_len=64, **settings):
    return num_blocks_for(EngineConfig(model="m", **settings), LAYOUT, max_model_len, CPU)


def test_shapes_and_bytes():
    assert LAYOUT.bytes_per_block == BLOCK_BYTES
    storage = KVStorage(LAYOUT, 5, CPU)
    assert len(storage.layers) == 3
    for pair in storage.layers:
        assert all(t.shape == (5, 16, 2, 8) and t.dtype == torch.bfloat16 and not t.any() for t in pair)
    assert sum(t.nbytes for pair in storage.layers for t in pair) == 5 * BLOCK_BYTES


def test_blocks_from_memory():
    assert _blocks() == DEFAULT_CPU_BYTES // BLOCK_BYTES
    assert _blocks(kv_cache_memory=10 * BLOCK_BYTES + BLOCK_BYTES - 1) == 10


def test_an_explicit_count_is_taken_however_small():
    assert _blocks(max_model_len=8192, num_kv_blocks=1) == 1
    assert _blocks(num_kv_blocks=7, kv_cache_memory=1) == 7


def test_memory_must_hold_one_longest_sequence():
    assert _blocks(max_model_len=65, kv_cache_memory=5 * BLOCK_BYTES) == 5
    with pytest.raises(ConfigError, match=r"4 blocks.*max_model_len 65 needs 5 blocks"):
        _blocks(max_model_len=65, kv_cache_memory=4 * BLOCK_BYTES)

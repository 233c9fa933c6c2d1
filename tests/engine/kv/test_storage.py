"""Sizes of the K/V tensors."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv import storage
from engine.kv.storage import DEFAULT_CPU_BYTES, CacheSize, KVLayout, KVStorage, size_cache

CPU = torch.device("cpu")
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=16, dtype=torch.bfloat16)
BLOCK_BYTES = 2 * 3 * 16 * 2 * 8 * 2


def _blocks(max_model_len=64, **settings):
    return size_cache(EngineConfig(model="m", **settings), LAYOUT, max_model_len, CPU).num_blocks


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


def _size(longest, **settings):
    return size_cache(EngineConfig(model="m", **settings), LAYOUT, longest, CPU)


def test_memory_must_hold_one_sequence_of_a_length_that_was_asked_for():
    assert _size(65, kv_cache_memory=5 * BLOCK_BYTES, max_model_len=65) == CacheSize(5, 65)
    with pytest.raises(ConfigError, match=r"4 blocks.*max_model_len 65 needs 5 blocks"):
        _size(65, kv_cache_memory=4 * BLOCK_BYTES, max_model_len=65)
    with pytest.raises(ConfigError, match="0 blocks"):
        _size(65, kv_cache_memory=BLOCK_BYTES - 1)


def test_without_a_length_sequences_are_as_long_as_fits(caplog):
    assert _size(65, kv_cache_memory=4 * BLOCK_BYTES) == CacheSize(4, 64)
    [line] = caplog.messages
    assert "at most 64 tokens" in line and "model's 65" in line


def test_a_cpu_gives_half_of_what_is_free_at_most(monkeypatch):
    def size(free, longest=64, reserved=0):
        monkeypatch.setattr(storage, "free_memory", lambda: free)
        return size_cache(EngineConfig(model="m"), LAYOUT, longest, CPU, reserved=reserved)

    whole = 2 * DEFAULT_CPU_BYTES // BLOCK_BYTES * 16  # tokens that need twice the usual bytes
    assert size(None) == size(100 << 30) == CacheSize(DEFAULT_CPU_BYTES // BLOCK_BYTES, 64)
    assert size(100 << 30, whole) == CacheSize(whole // 16, whole)
    assert size(2 << 30, whole) == CacheSize(DEFAULT_CPU_BYTES // BLOCK_BYTES, DEFAULT_CPU_BYTES // BLOCK_BYTES * 16)
    assert size(1 << 30, reserved=1 << 29).num_blocks == (1 << 28) // BLOCK_BYTES
    with pytest.raises(ConfigError, match="0 bytes"):
        size(1 << 30, reserved=1 << 30)

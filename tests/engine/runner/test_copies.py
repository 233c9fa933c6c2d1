"""Blocks to host memory and back, for every order of a block's content."""

from __future__ import annotations

import pytest
import torch

from engine.errors import ConfigError
from engine.kv.storage import KVLayout, KVStorage
from engine.runner.copies import block_parts, gather, make_copies, scatter, seconds_per_block

CPU = torch.device("cpu")


def filled(dtype: torch.dtype, keys_by_feature: bool) -> KVStorage:
    storage = KVStorage(KVLayout(3, 2, 5, 4, dtype, keys_by_feature), 10, CPU)
    for layer in storage.layers:
        for tensor in layer:
            tensor.copy_(torch.randn(tensor.shape))
    return storage


def content(storage: KVStorage, block: int) -> list[torch.Tensor]:
    return [tensor[block].clone() for layer in storage.layers for tensor in layer]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keys_by_feature", [False, True])
def test_blocks_come_back_as_they_were_wherever_they_are_put(dtype: torch.dtype, keys_by_feature: bool) -> None:
    storage = filled(dtype, keys_by_feature)
    before = [content(storage, block) for block in range(10)]
    copies = make_copies(storage, 6)
    copies.run(((7, 2), (3, 5)), ())
    copies.run((), ((5, 1), (2, 9)))
    assert same(content(storage, 1), before[3]) and same(content(storage, 9), before[7])
    untouched = [block for block in range(10) if block not in (1, 9)]
    assert all(same(content(storage, block), before[block]) for block in untouched)


def test_one_plan_may_store_and_load_a_slot_and_reuse_the_block() -> None:
    storage = filled(torch.float32, True)
    before = [content(storage, block) for block in range(10)]
    make_copies(storage, 4).run(((0, 3), (1, 0)), ((3, 1), (0, 0)))
    assert same(content(storage, 1), before[0]) and same(content(storage, 0), before[1])


@pytest.mark.parametrize("keys_by_feature", [False, True])
def test_the_gpus_way_moves_the_same_bytes(keys_by_feature: bool) -> None:
    storage = filled(torch.float16, keys_by_feature)
    before = [content(storage, block) for block in range(10)]
    parts = block_parts(storage, torch.int64)
    rows = gather(parts, torch.tensor([4, 6]))
    assert rows.shape == (2, storage.layout.bytes_per_block // 8)
    scatter(parts, torch.tensor([0, 9]), rows)
    assert same(content(storage, 0), before[4]) and same(content(storage, 9), before[6])


def test_more_host_memory_than_the_machine_has_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"host_kv_cache_gib asks for \d+ bytes"):
        make_copies(filled(torch.float32, False), 1 << 40)


def test_the_time_of_a_copy_is_measured() -> None:
    assert seconds_per_block(make_copies(filled(torch.float32, False), 2), 2) > 0

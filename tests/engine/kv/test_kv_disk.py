"""The tier below host memory: what leaves that goes to disk, and comes back from there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_kv import A, B, C, Maker, admit
from helpers_models import make_gguf

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.executor.local import LocalExecutor
from engine.kv.disk_file import rows_on_disk
from engine.kv.host import HostTier
from engine.kv.manager import PagedKVCache
from engine.kv.storage import KVLayout, KVStorage
from engine.runner.copies import make_copies
from engine.types import SamplingParams, Sequence

torch.set_num_threads(1)


def cache(num_host_slots: int = 2, num_disk_slots: int = 8) -> PagedKVCache:
    return PagedKVCache(4, 4, True, {"model": "m"}, num_host_slots, None, num_disk_slots)


def run(kv: PagedKVCache, seq: Sequence) -> tuple[int, int]:
    """From admission to end. Returns the tokens found, and of its loads those from disk."""
    before = kv.host.num_from_disk
    assert admit(kv, seq)
    found = seq.num_computed
    kv.take_copies()
    seq.num_computed = len(seq.tokens)
    kv.commit(seq)
    kv.forget(seq)
    kv.check()
    return found, kv.host.num_from_disk - before


def test_what_leaves_host_memory_is_found_on_disk() -> None:
    kv, make = cache(), Maker()
    for tokens in (A[:9], B[:9], C[:9], B[16:25], C[16:25]):
        assert run(kv, make(tokens)) == (0, 0)
    assert run(kv, make(A[:9])) == (8, 2)
    assert kv.host.num_to_disk >= 2 and kv.host_hits == 8
    assert run(kv, make(A[:9], salt="other")) == (0, 0)


def test_moves_come_before_the_stores_that_take_their_slots() -> None:
    tier = HostTier(1, 2)
    tier.spill(5, b"a")
    assert tier.take_copies() == (((5, 0),), (), ())
    tier.spill(6, b"b")
    assert tier.take_copies() == (((6, 0),), (), ((0, 1),))
    assert (tier.find(b"a"), tier.find(b"b")) == (1, 0)
    tier.spill(7, b"a")
    assert tier.take_copies() == ((), (), ()), "it is there"
    tier.check()


def test_a_slot_without_its_content_yet_is_not_moved() -> None:
    tier = HostTier(1, 2)
    tier.spill(5, b"a")
    tier.spill(6, b"b")
    assert tier.take_copies() == (((5, 0), (6, 0)), (), ())
    assert tier.find(b"a") is None and tier.num_to_disk == 0
    tier.check()


def test_what_is_being_read_stays_and_nothing_more_than_fits_is_kept() -> None:
    tier = HostTier(1, 1)
    for block, digest in enumerate((b"a", b"b")):
        tier.spill(block, digest)
        tier.take_copies()
    tier.reading([1])
    tier.load(1, 9)
    tier.spill(3, b"c")
    assert tier.take_copies() == (((3, 0),), ((1, 9),), ()), "b is lost: the only place on disk is a's"
    assert (tier.num_from_disk, tier.num_to_disk) == (1, 1)
    tier.check()


@pytest.mark.parametrize("keys_by_feature", [False, True])
def test_blocks_come_back_from_disk_as_they_were(tmp_path: Path, keys_by_feature: bool) -> None:
    storage = KVStorage(KVLayout(3, 2, 5, 4, torch.float16, keys_by_feature), 10, torch.device("cpu"))
    tensors = [tensor for layer in storage.layers for tensor in layer]
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [[tensor[block].clone() for tensor in tensors] for block in range(10)]
    copies = make_copies(storage, 2, 3, str(tmp_path))
    copies.run(((7, 0), (3, 1)), ())
    copies.run(((4, 0),), ((4, 8), (0, 9)), ((0, 4), (1, 2)))
    copies.run((), ((2, 1),))
    for block, was in ((8, 7), (9, 4), (1, 3)):
        assert all(torch.equal(t[block], old) for t, old in zip(tensors, before[was], strict=True))


def test_the_file_has_its_size_at_once_and_no_name(tmp_path: Path) -> None:
    rows = rows_on_disk(str(tmp_path), 6, 4096)
    rows[5] = 7
    assert rows.shape == (6, 4096) and not rows[0].any() and rows[5].all()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"disk_kv_cache_dir '/nowhere' cannot hold 24 bytes: No such file"):
        rows_on_disk("/nowhere", 6, 4)
    free = os.statvfs(tmp_path)
    with pytest.raises(ConfigError, match="cannot hold"):
        rows_on_disk(str(tmp_path), 2 * free.f_blocks, free.f_frsize)


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="disk_kv_cache_gib needs host_kv_cache_gib above 0, got 0"):
        EngineConfig("m", disk_kv_cache_gib=1.0)
    with pytest.raises(ConfigError, match="disk_kv_cache_gib must be at least 0"):
        EngineConfig("m", host_kv_cache_gib=1.0, disk_kv_cache_gib=-1.0)


def test_an_engine_answers_from_disk_as_if_it_had_computed_it(tmp_path: Path) -> None:
    gib = 1 << 30
    plain = EngineConfig(str(make_gguf(tmp_path)), device="cpu", num_kv_blocks=8, max_model_len=128, num_threads=1)
    executor = LocalExecutor(plain)
    probe = Engine(plain, executor=executor)
    block = executor.rank.runner.storage.layout.bytes_per_block
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = [[10 * n + i for i in range(50)] for n in range(1, 8)]
    wanted = [done.choices[0].token_ids for done in probe.generate(prompts, greedy)]
    tiers = replace(
        plain,
        host_kv_cache_gib=4 * block / gib,
        disk_kv_cache_gib=30 * block / gib,
        disk_kv_cache_dir=str(tmp_path / "disk"),
    )
    (tmp_path / "disk").mkdir()
    engine = Engine(tiers)
    assert engine.capacity.num_disk_slots == 30
    found = [[engine.generate([prompt], greedy)[0] for prompt in prompts] for _ in range(2)]
    for round_ in found:
        assert [done.choices[0].token_ids for done in round_] == wanted
    assert [done.num_cached_tokens for done in found[1]] == [48] * 7
    stats = engine.stats()
    assert stats.kv_blocks_to_disk > 7 and stats.kv_blocks_from_disk > 7
    assert not list((tmp_path / "disk").iterdir())
    for made in (probe, engine):
        made.close()

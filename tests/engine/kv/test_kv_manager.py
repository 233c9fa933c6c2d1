from __future__ import annotations

import pytest
from helpers_kv import A, B, C, Maker, admit

from engine.kv.manager import PagedKVCache
from engine.types import Sequence


def cache(num_blocks: int = 8, caching: bool = True, **fields: str) -> PagedKVCache:
    return PagedKVCache(num_blocks, 4, caching, fields or {"model": "m"})


@pytest.fixture
def make() -> Maker:
    return Maker()


def compute(kv: PagedKVCache, seq: Sequence) -> None:
    seq.num_computed = len(seq.tokens)
    kv.commit(seq)
    kv.check()


def run(kv: PagedKVCache, seq: Sequence) -> None:
    assert admit(kv, seq)
    compute(kv, seq)
    kv.forget(seq)
    kv.check()


def test_only_whole_blocks_and_never_the_whole_prompt_are_found(make: Maker) -> None:
    kv = cache()
    run(kv, make(A[:12]))
    found = {n: kv.lookup(make(A[:n])).num_tokens for n in (3, 4, 5, 8, 9, 11, 12, 13, 20)}
    assert found == {3: 0, 4: 0, 5: 4, 8: 4, 9: 8, 11: 8, 12: 8, 13: 12, 20: 12}


def test_nothing_is_found_when_caching_is_off_or_all_rows_are_wanted(make: Maker) -> None:
    kv = cache(caching=False)
    run(kv, make(A[:12]))
    assert kv.lookup(make(A[:12])).num_tokens == 0
    kv = cache()
    run(kv, make(A[:12]))
    assert kv.lookup(make(A[:12], prompt_logprobs=0)).num_tokens == 0
    run(kv, make(B[:12], prompt_logprobs=0))
    assert kv.lookup(make(B[:12])).num_tokens == 8, "what it computed may be shared"


def test_salts_and_root_fields_do_not_mix(make: Maker) -> None:
    kv = cache()
    run(kv, make(A[:12], salt="one"))
    assert kv.lookup(make(A[:12], salt="two")).num_tokens == 0
    assert kv.lookup(make(A[:12])).num_tokens == 0
    assert kv.lookup(make(A[:12], salt="one")).num_tokens == 8


def test_failed_reserve_changes_nothing(make: Maker) -> None:
    kv = cache(num_blocks=6)
    run(kv, make(A[:8]))
    hog = make(B[:12])
    assert admit(kv, hog)
    late = make(A[:24])
    hit = kv.lookup(late)
    assert hit.num_tokens == 8
    used = kv.num_used
    assert not kv.reserve(late, 24 - 8, hit)
    assert (late.blocks, late.num_computed, kv.num_used) == ([], 0, used)
    assert kv.lookup(late) == hit
    kv.check()


def test_reserving_does_not_evict_its_own_hit(make: Maker) -> None:
    kv = cache(num_blocks=4)
    run(kv, make(A[:8]))
    run(kv, make(B[:8]))  # the pool is now all cached blocks, A's being the oldest
    seq = make(A[:16])
    hit = kv.lookup(seq)
    assert admit(kv, seq)
    assert tuple(seq.blocks[:2]) == hit.block_ids and len(set(seq.blocks)) == 4 and seq.num_computed == 8


def test_sleeping_hit_blocks_are_not_counted_as_room(make: Maker) -> None:
    kv = cache(num_blocks=4)
    run(kv, make(A[:8]))
    hog = make(B[:8])
    assert admit(kv, hog)
    assert not admit(kv, make(A[:12])), "two free blocks, both part of the hit"


def test_shared_blocks_count_once_and_stay_until_the_last_owner_leaves(make: Maker) -> None:
    kv = cache()
    run(kv, make(A[:8]))
    one, two = make(A[:10]), make(A[:11])
    assert admit(kv, one) and admit(kv, two)
    assert one.blocks[:2] == two.blocks[:2] and kv.num_used == 4
    kv.forget(one)
    kv.check()
    assert kv.num_used == 3
    kv.forget(two)
    assert kv.num_used == 0


def test_twins_computed_together_are_not_merged(make: Maker) -> None:
    kv = cache()
    one, two = make(A[:8]), make(A[:8])
    assert admit(kv, one) and admit(kv, two)
    compute(kv, one)
    compute(kv, two)
    assert kv.lookup(make(A[:9])).block_ids == tuple(one.blocks)
    kv.forget(two)
    kv.forget(one)
    kv.check()


def test_spare_blocks_stay_free(make: Maker) -> None:
    kv = cache(num_blocks=4)
    assert not admit(kv, make(A[:12]), spare=2)
    assert admit(kv, make(A[:12]), spare=1)


def test_growth_by_single_tokens_takes_a_block_when_one_is_full(make: Maker) -> None:
    kv = cache(num_blocks=2)
    seq = make(A[:3])
    assert admit(kv, seq)
    sizes = []
    for token in B[:5]:
        compute(kv, seq)
        seq.tokens.append(token)
        assert kv.reserve(seq, 1)
        sizes.append(len(seq.blocks))
    assert sizes == [1, 2, 2, 2, 2]
    compute(kv, seq)
    seq.tokens.append(1)
    assert not kv.reserve(seq, 1)
    assert len(seq.blocks) == 2


def test_partly_filled_and_uncomputed_blocks_are_not_published(make: Maker) -> None:
    kv = cache()
    seq = make(A[:16])
    assert admit(kv, seq)
    seq.num_computed = 7
    kv.commit(seq)
    assert kv.lookup(make(A[:16])).num_tokens == 4


def test_tail_is_evicted_before_the_head(make: Maker) -> None:
    kv = cache(num_blocks=5)
    run(kv, make(A[:16]))
    found = []
    held = []
    for i in range(5):
        found.append(kv.lookup(make(A[:20])).num_tokens)
        held.append(make([1000 + i]))
        assert admit(kv, held[-1])
    assert found == [16, 16, 12, 8, 4]


def test_least_recently_freed_prefix_goes_first_and_use_refreshes(make: Maker) -> None:
    kv = cache(num_blocks=4)
    run(kv, make(A[:8]))
    run(kv, make(B[:8]))
    run(kv, make(A[:9]))  # takes A's blocks and evicts one of B's for the ninth token
    assert kv.lookup(make(A[:9])).num_tokens == 8
    assert kv.lookup(make(B[:9])).num_tokens == 4


def test_preempted_sequence_finds_its_own_blocks_and_the_counters_do_not_move(make: Maker) -> None:
    kv = cache()
    seq = make(A[:10])
    assert admit(kv, seq)
    compute(kv, seq)
    kv.release(seq)
    kv.check()
    assert (seq.blocks, seq.num_computed, kv.num_used) == ([], 0, 0)
    seq.tokens.extend(B[:7])
    assert admit(kv, seq)
    assert (seq.num_computed, seq.num_cached) == (8, 0)
    compute(kv, seq)
    assert kv.lookup(make(A[:10] + B[:7])).num_tokens == 16


def test_blocks_lost_to_eviction_are_published_again_after_a_preemption(make: Maker) -> None:
    kv = cache(num_blocks=3)
    seq = make(A[:8])
    assert admit(kv, seq)
    compute(kv, seq)
    kv.release(seq)
    run(kv, make(C[:12]))
    assert kv.lookup(make(A[:9])).num_tokens == 0
    assert admit(kv, seq)
    compute(kv, seq)
    assert kv.lookup(make(A[:9])).num_tokens == 8


def test_each_block_of_a_sequence_is_hashed_once(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kv import manager

    calls = []
    real = manager.block_digest
    monkeypatch.setattr(manager, "block_digest", lambda parent, ids: calls.append(1) or real(parent, ids))
    kv = cache()
    seq = make(A[:13])
    for _ in range(3):
        kv.lookup(seq)
    assert admit(kv, seq)
    for token in B[:8]:
        compute(kv, seq)
        seq.tokens.append(token)
        assert kv.reserve(seq, 1)
    kv.release(seq)
    assert admit(kv, seq)
    assert len(calls) == 5


def test_nothing_is_remembered_of_ended_sequences(make: Maker) -> None:
    kv = cache()
    run(kv, make(A[:8]))
    never_ran = make(B[:8])
    kv.lookup(never_ran)
    kv.forget(never_ran)
    assert kv.num_sequences == 0


def test_can_ever_fit_is_about_the_empty_cache(make: Maker) -> None:
    kv = cache(num_blocks=3)
    assert admit(kv, make(A[:12]))
    assert kv.can_ever_fit(12) and not kv.can_ever_fit(13)


def test_check_notices_a_stray_reference(make: Maker) -> None:
    kv = cache()
    seq = make(A[:8])
    assert admit(kv, seq)
    seq.blocks.pop()
    with pytest.raises(AssertionError, match="owners"):
        kv.check()

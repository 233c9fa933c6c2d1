"""What leaves the device's cache and comes back: spilled prefixes, swapped sequences, pins, adopted blocks."""

from __future__ import annotations

import pytest
from helpers_kv import A, B, C, Maker, admit

from engine.kv.manager import PagedKVCache
from engine.types import Sequence


def cache(num_blocks: int = 4, num_host_slots: int = 8, caching: bool = True) -> PagedKVCache:
    return PagedKVCache(num_blocks, 4, caching, {"model": "m"}, num_host_slots)


@pytest.fixture
def make() -> Maker:
    return Maker()


def compute(kv: PagedKVCache, seq: Sequence, num_tokens: int | None = None) -> None:
    seq.num_computed = len(seq.tokens) if num_tokens is None else num_tokens
    kv.commit(seq)
    kv.check()


def run(kv: PagedKVCache, seq: Sequence) -> None:
    assert admit(kv, seq)
    kv.take_copies()
    compute(kv, seq)
    kv.forget(seq)
    kv.check()


def test_an_evicted_prefix_comes_back_by_copy_and_counts_as_cached(make: Maker) -> None:
    kv = cache()
    first = make(A[:9])
    assert admit(kv, first)
    compute(kv, first)
    blocks = list(first.blocks)
    kv.forget(first)
    hog = make(B[:16])
    assert admit(kv, hog)
    stores, loads, _ = kv.take_copies()
    assert loads == () and {block for block, _ in stores} == set(blocks[:2]), "the partly filled block is not kept"
    slot_of = dict(stores)
    kv.forget(hog)
    again = make(A[:9])
    hit = kv.lookup(again)
    assert (hit.block_ids, hit.num_tokens) == ((), 8)
    assert admit(kv, again)
    stores, loads, _ = kv.take_copies()
    assert stores == ()
    assert loads == ((slot_of[blocks[0]], again.blocks[0]), (slot_of[blocks[1]], again.blocks[1]))
    assert (again.num_computed, again.num_cached, kv.host_hits) == (8, 8, 8)


def test_a_prefix_spilled_twice_is_copied_once(make: Maker) -> None:
    kv = cache()
    for tokens in (A[:9], B[:16], A[:9], C[:16]):
        run(kv, make(tokens))
    assert kv.host.num_spilled == 2 + 4, "A's blocks were there already when C drove them out again"


def test_a_block_that_is_being_loaded_is_shared_but_not_used_yet(make: Maker) -> None:
    kv = cache(num_blocks=6)
    run(kv, make(A[:9]))
    run(kv, make(B[:24]))
    one, two, other = make(A[:9]), make(A[:10]), make(C[:4])
    assert admit(kv, one) and admit(kv, two) and admit(kv, other)
    assert one.blocks[:2] == two.blocks[:2]
    assert kv.loading(one) and kv.loading(two) and not kv.loading(other)
    assert len(kv.take_copies().loads) == 2
    assert not kv.loading(one) and not kv.loading(two)


def test_tenants_do_not_meet_in_host_memory(make: Maker) -> None:
    kv = cache()
    run(kv, make(A[:9], salt="one"))
    run(kv, make(B[:16]))
    assert kv.lookup(make(A[:9], salt="two")).num_tokens == 0
    assert kv.lookup(make(A[:9], salt="one")).num_tokens == 8


@pytest.mark.parametrize("caching", [True, False])
def test_a_swapped_sequence_gets_every_computed_token_back(make: Maker, caching: bool) -> None:
    kv = cache(caching=caching)
    seq = make(A[:11])
    assert admit(kv, seq)
    compute(kv, seq, 10)
    blocks = list(seq.blocks)
    assert kv.swap_out(seq)
    kv.check()
    assert (seq.blocks, seq.num_computed, kv.num_used, kv.host.num_used) == ([], 0, 0, 3)
    assert [block for block, _ in kv.take_copies().stores] == blocks
    run(kv, make(B[:16]))
    assert admit(kv, seq)
    assert (seq.num_computed, seq.num_cached, kv.host.num_used) == (10, 0, 3), "its slots are still to be read"
    assert [block for _, block in kv.take_copies().loads] == seq.blocks
    kv.check()
    assert kv.host.num_used == 0
    compute(kv, seq)


def test_what_is_still_on_the_device_is_not_loaded(make: Maker) -> None:
    kv = cache()
    seq = make(A[:11])
    assert admit(kv, seq)
    compute(kv, seq, 10)
    blocks = list(seq.blocks)
    assert kv.swap_out(seq) and admit(kv, seq)
    assert seq.blocks[:2] == blocks[:2]
    stores, loads, _ = kv.take_copies()
    assert len(stores) == 3 and [block for _, block in loads] == [seq.blocks[2]]


def test_without_room_in_host_memory_nothing_changes(make: Maker) -> None:
    kv = cache(num_host_slots=2)
    seq, held = make(A[:11]), make(B[:4])
    assert admit(kv, held)
    compute(kv, held)
    assert kv.swap_out(held)
    assert admit(kv, seq)
    compute(kv, seq, 10)
    blocks = list(seq.blocks)
    assert not kv.swap_out(seq)
    assert (seq.blocks, seq.num_computed, kv.host.num_used) == (blocks, 10, 1)
    kv.check()


def test_an_ended_sequence_leaves_no_slot_behind(make: Maker) -> None:
    kv = cache()
    seq = make(A[:11])
    assert admit(kv, seq)
    compute(kv, seq, 10)
    assert kv.swap_out(seq)
    kv.forget(seq)
    kv.check()
    assert kv.host.num_used == 0
    loading = make(A[:11])
    assert admit(kv, loading)
    kv.forget(loading)  # before the plan that loads is made
    kv.take_copies()
    kv.check()
    assert kv.host.num_used == kv.num_used == 0


def test_pinned_prefixes_are_evicted_last_and_pins_outlive_eviction(make: Maker) -> None:
    kv = cache(num_host_slots=0)
    pinned = kv.digests(A[:8], "")
    kv.pin(pinned)
    run(kv, make(A[:9]))
    for start in range(0, 16, 4):
        run(kv, make(B[start : start + 8]))
    assert kv.lookup(make(A[:9])).num_tokens == 8
    run(kv, make(C[:16]))  # needs every block there is
    assert kv.lookup(make(A[:9])).num_tokens == 0
    run(kv, make(A[:9]))
    run(kv, make(B[:8]))
    assert kv.lookup(make(A[:9])).num_tokens == 8
    kv.unpin(pinned)
    run(kv, make(C[:8]))
    run(kv, make(B[8:16]))
    assert kv.lookup(make(A[:9])).num_tokens == 0


def test_adopted_blocks_are_found_but_count_as_cached_only_from_the_second_use_on(make: Maker) -> None:
    kv = cache(num_host_slots=0)
    digests = kv.digests(A[:8], "tenant")
    assert [index for index, _ in kv.adopt(digests)] == [0, 1]
    assert kv.adopt(digests) == [] and kv.num_used == 0
    kv.check()
    assert kv.find(kv.digests(A[:8], "")) == ()
    cached = []
    for _ in range(2):
        seq = make(A[:9], salt="tenant")
        run(kv, seq)
        cached.append(seq.num_cached)
    assert cached == [0, 8]


def test_adopting_takes_what_fits(make: Maker) -> None:
    kv = cache(num_blocks=3)
    run(kv, make(B[:12]))
    hog = make(C[:4])
    assert admit(kv, hog)
    kv.take_copies()
    assert [index for index, _ in kv.adopt(kv.digests(A[:12], ""))] == [0, 1]
    assert kv.take_copies().stores == (), "what was there is overwritten at once"
    kv.check()

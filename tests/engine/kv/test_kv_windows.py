"""What a sequence with a window holds, lets go of and finds again."""

from __future__ import annotations

import pytest
from helpers_kv import A, B, C, Maker, admit
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.base import GONE
from engine.kv.manager import PagedKVCache
from engine.kv.window import KVWindow, widest
from engine.types import Sequence

SIZE = 4
LONG = [*A, *B, *C]


def cache(num_blocks: int = 12, window: int = 8, sinks: int = 0, ahead: int = 4, slots: int = 0) -> PagedKVCache:
    return PagedKVCache(num_blocks, SIZE, True, {"model": "m"}, slots, KVWindow(window, sinks, ahead))


@pytest.fixture
def make() -> Maker:
    return Maker()


def compute(kv: PagedKVCache, seq: Sequence, upto: int | None = None) -> None:
    """In steps of four tokens."""
    upto = len(seq.tokens) if upto is None else upto
    while seq.num_computed < upto:
        granted = kv.extend(seq, min(4, upto - seq.num_computed))
        assert granted
        seq.num_computed += granted
        kv.commit(seq)
        kv.check()


@given(
    size=st.integers(1, 40), sinks=st.integers(0, 20), ahead=st.integers(1, 50), block=st.sampled_from([1, 3, 4, 16]),
    num_computed=st.integers(0, 300), new=st.integers(1, 50),
)  # fmt: skip
def test_blocks_that_are_gone_are_seen_by_none_and_the_bounds_hold(
    size: int, sinks: int, ahead: int, block: int, num_computed: int, new: int
) -> None:
    window = KVWindow(size, sinks, ahead)
    gone = window.gone(num_computed, block)
    for query in range(num_computed, num_computed + 3):
        seen = {key // block for key in range(query + 1) if key < sinks or key > query - size}
        assert seen.isdisjoint(gone)
    assert not gone or gone.stop * block + block > num_computed - size + 1, "nothing that may go is kept"
    entered = num_computed - num_computed % block  # where blocks were last let go, going on token by token
    assert num_computed // block + 1 - len(window.gone(entered, block)) <= window.least_blocks(block)
    end = num_computed + min(new, ahead)
    assert -(-end // block) - len(window.gone(num_computed, block)) <= window.most_blocks(block)


def test_the_layer_that_sees_most_decides() -> None:
    assert widest((8, 16, 8)) == 16
    assert widest((8, None)) is None and widest((None,)) is None


def test_a_prompt_takes_what_it_can_use_at_once_and_slides(make: Maker) -> None:
    kv = cache()
    seq = make(LONG[:60])
    assert admit(kv, seq)
    most = kv.num_used
    assert most == KVWindow(8, 0, 4).most_blocks(SIZE) < 60 // SIZE
    compute(kv, seq)
    assert kv.num_used <= most
    assert seq.blocks[:11] == [GONE] * 11 and GONE not in seq.blocks[12:]
    kv.forget(seq)
    kv.check()
    assert kv.num_used == 0


def test_sinks_stay(make: Maker) -> None:
    kv = cache(sinks=5)
    seq = make(LONG[:60])
    assert admit(kv, seq)
    first = seq.blocks[:2]
    compute(kv, seq)
    assert seq.blocks[:2] == first and set(seq.blocks[2:11]) == {GONE}


def test_what_was_let_go_stays_cached_until_the_room_is_needed(make: Maker) -> None:
    kv = cache(num_blocks=40)
    seq = make(LONG[:60])
    assert admit(kv, seq)
    compute(kv, seq)
    assert kv.lookup(make(LONG[:25])).num_tokens == 24
    whole = kv.lookup(make(LONG[:61]))
    assert whole.num_tokens == 60 and whole.block_ids[:13] == (GONE,) * 13
    assert list(whole.block_ids[13:]) == seq.blocks[13:15]
    tight = cache(num_blocks=6)
    seq = make(LONG[:60])
    assert admit(tight, seq)
    compute(tight, seq)
    tight.forget(seq)
    assert tight.lookup(make(LONG[:61])).num_tokens == 60, "its last blocks are there, which is what counts"
    assert tight.lookup(make(LONG[:25])).num_tokens == 0


def test_a_prefix_ends_where_what_its_next_token_sees_is_there(make: Maker) -> None:
    kv = cache(num_blocks=16)
    seq = make(LONG[:64])
    assert admit(kv, seq)
    compute(kv, seq)
    kv.forget(seq)
    hog = make([1000 + i for i in range(4)])
    assert admit(kv, hog)
    found = [kv.lookup(make(LONG[:n])).num_tokens for n in range(1, 66, 8)]
    assert found[-1] in (60, 64) and sorted(found) == found


def test_a_swapped_sequence_brings_back_its_window_only(make: Maker) -> None:
    kv = cache(num_blocks=8, sinks=3, slots=10)
    seq = make(LONG[:50])
    assert admit(kv, seq)
    compute(kv, seq, 42)
    kv.take_copies()
    held = [block for block in seq.blocks[:11] if block != GONE]
    assert kv.swap_out(seq)
    kv.check()
    stores = kv.take_copies().stores
    assert sorted(block for block, _ in stores) == sorted(held) and kv.host.num_used == len(held)
    other = make([1000 + i for i in range(32)])
    assert admit(kv, other)
    compute(kv, other)
    kv.take_copies()
    kv.forget(other)
    assert admit(kv, seq) and seq.num_computed == 42
    assert len(kv.take_copies().loads) == len(held)
    kv.check()
    compute(kv, seq)


def test_room_is_counted_by_what_is_held_at_once(make: Maker) -> None:
    kv = cache(num_blocks=4, window=8)
    assert kv.can_ever_fit(10_000) and not cache(num_blocks=2, window=8).can_ever_fit(10_000)
    assert cache(num_blocks=2, window=8).can_ever_fit(8)
    seq = make(LONG[:90])
    assert kv.demand(seq, kv.lookup(seq)) == 4
    assert admit(kv, seq)
    compute(kv, seq)
    assert kv.held(seq) <= 4

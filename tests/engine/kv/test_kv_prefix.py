from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.kv.prefix import block_digest, block_digests, root_digest

fields = st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3)


def test_meaning_is_part_of_the_root() -> None:
    assert root_digest({"adapter": "S1"}) != root_digest({"salt": "S1"})
    assert root_digest({"adapter": "S1", "salt": ""}) != root_digest({"adapter": "", "salt": "S1"})
    assert root_digest({"salt": "a", "model": "bc"}) != root_digest({"salt": "ab", "model": "c"})
    assert root_digest({"model": "m", "weights": "w1"}) != root_digest({"model": "m", "weights": "w2"})


def test_order_of_fields_does_not_matter() -> None:
    assert root_digest({"a": "1", "b": "2"}) == root_digest({"b": "2", "a": "1"})


def test_a_lone_surrogate_is_hashed_like_any_text() -> None:
    assert root_digest({"salt": "\ud800"}) != root_digest({"salt": "\ud801"})


def test_digests_are_stable_across_processes_and_machines() -> None:
    digest = block_digest(root_digest({"model": "m"}), (1, 2, 70000))
    assert digest.hex() == "cc163edc700d71f24a66785aaca589150de247c62cc97574aee105ae3a6053ce"


@given(fields, fields)
def test_roots_are_equal_only_for_equal_fields(a: dict[str, str], b: dict[str, str]) -> None:
    assert (root_digest(a) == root_digest(b)) == (a == b)


tokens = st.lists(st.integers(0, 2**32 - 1), max_size=5)


@given(tokens, tokens)
def test_blocks_are_equal_only_for_equal_tokens_and_parents(a: list[int], b: list[int]) -> None:
    root = root_digest({})
    assert (block_digest(root, a) == block_digest(root, b)) == (a == b)
    assert block_digest(root, a) != block_digest(root_digest({"salt": "x"}), a)
    assert block_digest(root, a + b) != block_digest(block_digest(root, a), b)


def test_token_ids_have_fixed_width() -> None:
    root = root_digest({})
    assert block_digest(root, (1, 23)) != block_digest(root, (12, 3))
    assert block_digest(root, (256,)) != block_digest(root, (1, 0))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(1, 17))
def test_a_chain_is_its_blocks_one_after_another(tokens: list[int], size: int) -> None:
    parent, wanted = root_digest({"model": "m"}), []
    for at in range(0, len(tokens) - size + 1, size):
        parent = block_digest(parent, tokens[at : at + size])
        wanted.append(parent)
    assert [*block_digests(root_digest({"model": "m"}), tokens, size)] == wanted

"""Belief about who holds which prefix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.prefixes import BLOCK, KEY_BYTES, PrefixIndex, chain
from engine.kv.prefix import block_digest, root_digest

KEYS = [bytes([i]) for i in range(6)]


def test_a_chain_is_what_a_replica_caches() -> None:
    tokens = list(range(40))
    root = root_digest({"model": "w", "kv_dtype": "auto", "salt": "s"})
    one = block_digest(root, tokens[:16])
    two = block_digest(one, tokens[16:32])
    assert [*chain({"model": "w", "kv_dtype": "auto"}, "s", tokens)] == [one[:KEY_BYTES], two[:KEY_BYTES]]


def test_the_last_token_is_never_cached() -> None:
    assert [len([*chain({}, "", range(n))]) for n in (0, 1, 16, 17, 32, 33)] == [0, 0, 0, 1, 1, 2]


def test_salts_share_nothing() -> None:
    assert not set(chain({}, "a", range(100))) & set(chain({}, "b", range(100)))


def test_long_prompts_have_bounded_chains() -> None:
    assert len([*chain({}, "", range(100_000))]) == 1024


def test_overlap_ends_at_the_first_block_that_is_missing() -> None:
    index = PrefixIndex(100)
    index.add("x", KEYS)
    index.add("y", KEYS[:2])
    index.add("z", [KEYS[0], KEYS[2]])
    assert index.cached_tokens(KEYS) == {"x": 6 * BLOCK, "y": 2 * BLOCK, "z": BLOCK}
    assert index.cached_tokens([b"?", *KEYS]) == {} and index.cached_tokens([]) == {}


def test_what_a_replica_reports_counts() -> None:
    index = PrefixIndex(100)
    index.add("x", KEYS)
    index.remove("x", [KEYS[3], b"?"])
    index.remove("nobody", KEYS)
    assert index.cached_tokens(KEYS) == {"x": 3 * BLOCK}


def test_the_oldest_ends_go_first() -> None:
    index = PrefixIndex(4)
    index.add("x", KEYS[:3])
    index.add("x", [b"a", b"b"])
    assert index.cached_tokens(KEYS) == {"x": 2 * BLOCK}
    assert index.cached_tokens([b"a", b"b"]) == {"x": 2 * BLOCK}


replicas = st.sampled_from("pqrst")
steps = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "forget"]), replicas, st.lists(st.sampled_from(KEYS), unique=True)),
    max_size=60,
)


@given(steps, st.permutations(KEYS))
def test_it_agrees_with_plain_sets(moves: list[tuple[str, str, list[bytes]]], keys: list[bytes]) -> None:
    index, held = PrefixIndex(100), {name: set[bytes]() for name in "pqrst"}
    for what, name, some in moves:
        match what:
            case "add":
                index.add(name, some)
                held[name] |= set(some)
            case "remove":
                index.remove(name, some)
                held[name] -= set(some)
            case _:
                index.forget(name)
                held[name].clear()
    depth = {n: next((i for i, k in enumerate(keys) if k not in has), len(keys)) for n, has in held.items()}
    assert index.cached_tokens(keys) == {name: n * BLOCK for name, n in depth.items() if n}
    assert len(index) == len(set().union(*held.values()))


@given(steps)
def test_it_stays_within_its_bound(moves: list[tuple[str, str, list[bytes]]]) -> None:
    index = PrefixIndex(2)
    for _, name, some in moves:
        index.add(name, some)
    assert sum(index.cached_tokens([key]).get(n, 0) for key in KEYS for n in "pqrst") <= 5 * 2 * BLOCK

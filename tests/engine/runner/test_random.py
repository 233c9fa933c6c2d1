from __future__ import annotations

import numpy as np
import pytest

from engine.runner.random import choice_seed, derive_seed, uniform


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def test_values_are_pinned_so_that_a_seed_survives_restarts_and_releases() -> None:
    got = uniform([0, 1, 7, -1, 2**64 + 5], [0, 0, 31, 2, 9])
    assert got.tolist() == PINNED
    assert uniform([5], [9])[0] == got[4]  # seeds are taken modulo 2**64


def test_row_alone_equals_row_in_a_batch() -> None:
    seeds, positions = list(range(100)), [3 * i for i in range(100)]
    whole = uniform(seeds, positions)
    assert [float(uniform([s], [p])[0]) for s, p in zip(seeds, positions, strict=True)] == whole.tolist()


@pytest.mark.parametrize("vary", ["seed", "position", "both"])
def test_uniform_on_the_unit_interval_and_along_both_arguments(vary: str) -> None:
    n = 40_000
    counter, fixed = list(range(n)), [17] * n
    u = uniform(fixed if vary == "position" else counter, fixed if vary == "seed" else counter)
    assert u.dtype == np.float64 and u.min() >= 0.0 and u.max() < 1.0
    assert chi_square(np.histogram(u, bins=100, range=(0, 1))[0]) < 160  # 99 degrees of freedom, p about 1e-4
    pairs = np.histogram2d(u[:-1], u[1:], bins=10, range=((0, 1), (0, 1)))[0]
    assert chi_square(pairs) < 160


def test_next_seed_and_next_position_are_unrelated() -> None:
    n = 10_000
    a, b = uniform(range(1, n + 1), [0] * n), uniform(range(n), [1] * n)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    assert not np.intersect1d(a, b).size


def test_choices_have_streams_of_their_own_and_the_first_keeps_the_seed() -> None:
    seeds = [choice_seed(5, i) for i in range(128)]
    assert seeds[0] == 5 and len(set(seeds)) == 128
    assert all(0 <= s < 2**64 for s in seeds)
    assert choice_seed(-1, 0) == 2**64 - 1
    u = uniform(seeds, [14] * 128)
    assert chi_square(np.histogram(u, bins=8, range=(0, 1))[0]) < 27
    assert not {choice_seed(6, i) for i in range(128)} & set(seeds)


def test_derived_seeds_depend_on_both_parts() -> None:
    assert derive_seed(0, "cmpl-1") == derive_seed(0, "cmpl-1")
    seeds = {derive_seed(e, r) for e in range(4) for r in (0, 1, 2, "a", "b")}
    assert len(seeds) == 20 and all(0 <= s < 2**64 for s in seeds)


PINNED = [0.6524484863740322, 0.36818951565166946, 0.9087376791929267, 0.510562089893682, 0.7695338219391825]

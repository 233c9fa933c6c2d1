"""The filters and the inverse CDF against a slow oracle in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.runner.draw import DrawRows, draw_ranked, draw_unranked
from engine.runner.rows import row_argmax, top_ranked

torch.set_num_threads(1)
GRID = 2000


def exact(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[list[float], float]:
    """(probability of each token, distance of the nearest candidate cut from top_p's and min_p's thresholds)."""
    peak = max(row)
    weights = [math.exp((x - peak) / temperature) for x in row]
    order = sorted(range(len(row)), key=lambda t: (-row[t], t))
    margin = 1.0
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        mass = math.fsum(weights[t] for t in order)
        kept, total = [], 0.0
        for t in order:
            kept.append(t)
            total += weights[t]
            margin = min(margin, abs(total / mass - top_p))
            if total >= top_p * mass:
                break
        order = kept
    if min_p > 0:  # which the best token passes whatever it is
        margin = min([margin, *(abs(weights[t] - min_p) for t in order if row[t] < peak)])
    order = [t for t in order if weights[t] >= min_p] or order[:1]
    mass = math.fsum(weights[t] for t in order)
    return [weights[t] / mass if t in set(order) else 0.0 for t in range(len(row))], margin


def same_row(row: list[float], u: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """One draw of the same distribution for each u."""
    n = len(u)
    logits = torch.tensor([row]).expand(n, -1).contiguous()
    rows = DrawRows(
        torch.full((n,), temperature),
        torch.full((n,), top_k),
        torch.full((n,), top_p, dtype=torch.float64),
        torch.full((n,), min_p),
        u,
    )
    draw = draw_ranked if top_k or top_p < 1.0 or min_p else draw_unranked
    return draw(logits, row_argmax(logits)[0], rows)


level = st.one_of(st.integers(-20, 20).map(lambda i: i / 4), st.just(-math.inf), st.floats(-6, 6, width=32))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    row=st.lists(level, min_size=50, max_size=50),
    temperature=st.sampled_from([1e-5, 1e-3, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 2, 5, 40, 49]),
    top_p=st.sampled_from([1.0, 1e-9, 0.1, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_share_of_the_grid_is_the_exact_distribution(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    assume(max(row) > -math.inf)
    probs, margin = exact(row, temperature, top_k, top_p, min_p)
    assume(margin > 1e-5)
    u = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    share = torch.bincount(same_row(row, u, temperature, top_k, top_p, min_p), minlength=50) / GRID
    for token in range(50):
        assert abs(float(share[token]) - probs[token]) <= 1.01 / GRID + 1e-4
        assert probs[token] > 0 or share[token] == 0


@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (2, 1.0, 0.0), (0, 0.99, 0.0), (0, 1.0, 1e-6)])
@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_no_draw_of_probability_zero_at_the_ends(filters: tuple[int, float, float], u: float) -> None:
    row = [-math.inf, -500.0, 1.0, 1.0, -500.0, -math.inf]
    wide = row[:1] * 600 + row + row[-1:] * 600
    for r in (row, wide):
        token = int(same_row(r, torch.tensor([u], dtype=torch.float64), 1.0, *filters)[0])
        assert r[token] == 1.0


def quantised(seed: int, vocab: int, steps: float | None) -> Tensor:
    x = torch.randn(6, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    return x if steps is None else (x * steps).round() / steps


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([257, 600, 5000, 9001]),
    steps=st.sampled_from([None, 8.0, 1.0]),
    width=st.sampled_from([1, 32, 64, 512, 4096, 10_000]),
)
def test_certain_part_of_a_window_is_the_start_of_the_full_order(
    seed: int, vocab: int, steps: float | None, width: int
) -> None:
    x = quantised(seed, vocab, steps)
    values, ids, certain = top_ranked(x, width)
    full_values, full_ids = torch.sort(x, dim=-1, descending=True, stable=True)
    size = min(width, vocab)
    assert torch.equal(values, full_values[:, :size])
    for i, n in enumerate(certain.tolist()):
        assert n == vocab if width >= vocab else n < width
        assert torch.equal(ids[i, :n], full_ids[i, :n])


def test_zero_and_minus_zero_tie() -> None:
    _, ids, _ = top_ranked(torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]]), 4)
    assert ids[0].tolist() == [0, 1, 2, 3]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    steps=st.sampled_from([None, 8.0, 1.0]),
    filters=st.lists(
        st.tuples(
            st.sampled_from([0, 2, 25, 40, 400, 4500, 8999]),
            st.sampled_from([1.0, 0.3, 0.9, 0.999]),
            st.sampled_from([0.0, 1e-4, 0.1]),
        ),
        min_size=6,
        max_size=6,
    ),
)
def test_windows_give_what_a_full_sort_gives(
    seed: int, steps: float | None, filters: list[tuple[int, float, float]]
) -> None:
    x = quantised(seed, 9001, steps)
    u = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    top_k, top_p, min_p = (list(f) for f in zip(*filters, strict=True))
    rows = DrawRows(
        torch.full((6,), 0.9), torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64), torch.tensor(min_p), u
    )
    got = draw_ranked(x, row_argmax(x)[0], rows)
    for i in range(6):
        values, ids = torch.sort(x[i].double(), descending=True, stable=True)
        weights = ((values - values[0]) / 0.9).exp()
        keep = torch.ones_like(weights, dtype=torch.bool)
        if top_k[i]:
            keep[top_k[i] :] = False
        if top_p[i] < 1.0:
            before = (weights * keep).cumsum(-1) - weights
            keep &= before < top_p[i] * (weights * keep).sum() - 1e-9
        keep &= weights >= min_p[i]
        cumulative = (weights * keep).cumsum(-1)
        # The token's interval holds u, give or take float32 noise at the cut of top_p.
        rank = int((ids == got[i]).nonzero())
        total = float(cumulative[-1])
        slack = 2e-6 * total + 2 * float(weights[keep][-1])
        assert cumulative[rank] - weights[rank] - slack <= float(u[i]) * total <= cumulative[rank] + slack


def test_unranked_draw_over_many_blocks_inverts_the_cdf_in_id_order() -> None:
    x = torch.randn(1, 70_001, generator=torch.Generator().manual_seed(0)).expand(500, -1).contiguous()
    u = (torch.arange(500, dtype=torch.float64) + 0.5) / 500
    one = torch.ones(500)
    rows = DrawRows(one, torch.zeros(500, dtype=torch.int64), one.double(), 0 * one, u)
    got = draw_unranked(x, row_argmax(x)[0], rows)
    cumulative = x[0].double().softmax(-1).cumsum(-1)
    assert (got[1:] >= got[:-1]).all()
    assert ((cumulative[got] - u).abs() < 1e-3).all()
    inside = (cumulative[got] >= u - 1e-6) & (cumulative[(got - 1).clamp(min=0)] <= u + 1e-6)
    assert inside.all()

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.runner.logprobs import FLOOR, token_logprobs

torch.set_num_threads(1)


def oracle(row: list[float]) -> list[float]:
    peak = max(row)
    norm = peak + math.log(math.fsum(math.exp(x - peak) for x in row))
    return [max(x - norm, FLOOR) for x in row]


logits = st.lists(st.one_of(st.integers(-8, 8).map(lambda i: i / 4), st.just(-math.inf)), min_size=8, max_size=8)


@settings(deadline=None)
@given(st.lists(st.tuples(logits, st.integers(0, 7), st.integers(0, 12)), min_size=1, max_size=5))
def test_equals_the_scalar_oracle(rows: list[tuple[list[float], int, int]]) -> None:
    rows = [(row, target, k) for row, target, k in rows if max(row) > -math.inf]
    if not rows:
        return
    got = token_logprobs(torch.tensor([r for r, _, _ in rows]), [t for _, t, _ in rows], [k for _, _, k in rows])
    for (row, target, k), entry in zip(rows, got, strict=True):
        want = oracle(row)
        assert entry.token_id == target
        assert entry.logprob == pytest.approx(want[target], abs=1e-5)
        best = sorted(range(8), key=lambda t: (-row[t], t))[:k]
        if k and target not in best:
            best.append(target)
        assert [t for t, _ in entry.top] == best
        for t, lp in entry.top:
            assert lp == pytest.approx(want[t], abs=1e-5) and math.isfinite(lp)
        if k:
            assert dict(entry.top)[target] == entry.logprob
        else:
            assert entry.top == ()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 2, 5, 20]), st.sampled_from([None, 8.0, 1.0, 0.25]))
def test_large_vocabulary_with_many_ties(seed: int, k: int, steps: float | None) -> None:
    x = torch.randn(3, 9001, generator=torch.Generator().manual_seed(seed)) * 2
    if steps is not None:
        x = (x * steps).round() / steps
    want = x.double().log_softmax(-1)
    got = token_logprobs(x.clone(), [0, 1, 9000], [k, 1, 0])
    for i, (target, n) in enumerate(zip([0, 1, 9000], [k, 1, 0], strict=True)):
        order = torch.sort(x[i], descending=True, stable=True).indices.tolist()[:n]
        assert [t for t, _ in got[i].top][:n] == order
        assert got[i].logprob == pytest.approx(float(want[i, target]), abs=2e-5)


def test_minus_infinity_is_clamped_to_the_floor() -> None:
    x = torch.tensor([[0.0, -math.inf, -math.inf, -20_000.0]])
    (entry,) = token_logprobs(x, [1], [4])
    assert entry.logprob == -9999.0
    assert entry.top == ((0, 0.0), (3, -9999.0), (1, -9999.0), (2, -9999.0))


def test_top_longer_than_the_vocabulary() -> None:
    (entry,) = token_logprobs(torch.zeros(1, 3), [2], [20])
    assert [t for t, _ in entry.top] == [0, 1, 2]
    assert entry.logprob == pytest.approx(-math.log(3), abs=1e-6)


def test_logits_are_left_as_they_are_and_rows_do_not_depend_on_each_other() -> None:
    x = torch.randn(40, 3000, generator=torch.Generator().manual_seed(3))
    before = x.clone()
    targets, ks = list(range(40)), [i % 7 for i in range(40)]
    whole = token_logprobs(x, targets, ks)
    assert torch.equal(x, before)
    assert whole == [
        token_logprobs(x[i : i + 1], [t], [k])[0] for i, (t, k) in enumerate(zip(targets, ks, strict=True))
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unusable_logits_are_an_error(bad: float) -> None:
    with pytest.raises(EngineError, match="NaN or infinity"):
        token_logprobs(torch.tensor([[0.0, 1.0], [bad, 0.0]]), [0, 0], [0, 0])


def test_nothing_to_score() -> None:
    assert token_logprobs(torch.zeros(0, 5), [], []) == []

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runner.penalties import Penalised, TokenHistory, add_bias, ban, has_penalties, penalise, valid_ids
from engine.types import SamplingParams

torch.set_num_threads(1)
VOCAB = 20
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=200)


def counts(history: TokenHistory) -> dict[int, int]:
    ids = history.ids.tolist()
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, history.counts.tolist(), strict=True))


@settings(deadline=None)
@given(tokens, tokens, st.integers(0, 200), tokens)
def test_history_counts_after_any_rewind(prompt: list[int], first: list[int], keep: int, then: list[int]) -> None:
    history = TokenHistory(prompt, VOCAB)
    for t in first:
        history.append(t)
    history.rewind(keep)
    for t in then:
        history.append(t)
    output = first[:keep] + then
    assert history.output == output
    assert counts(history) == {t: 0 for t in prompt} | dict(Counter(output))


def test_history_grows_past_its_first_allocation() -> None:
    history = TokenHistory((), 5000)
    for t in range(5000):
        history.append(t)
    assert counts(history) == dict.fromkeys(range(5000), 1)


def scalar(x: float, p: SamplingParams, seen: bool, count: int) -> float:
    if seen:
        x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
    return x - p.frequency_penalty * count - p.presence_penalty * (count > 0)


rows = st.lists(
    st.tuples(
        tokens,
        tokens,
        st.builds(
            SamplingParams,
            repetition_penalty=st.floats(0.5, 2.0),
            frequency_penalty=st.floats(-2, 2),
            presence_penalty=st.floats(-2, 2),
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(rows, st.integers(0, 1000))
def test_penalties_equal_the_scalar_formula(rows: list[tuple[list[int], list[int], SamplingParams]], seed: int) -> None:
    logits = torch.randn(len(rows) + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    want = logits.clone()
    jobs = []
    for i, (prompt, output, params) in enumerate(rows):
        history = TokenHistory(prompt, VOCAB)
        for t in output:
            history.append(t)
        jobs.append(Penalised(i + 1, params, history))  # row 0 belongs to a sequence without penalties
        for t in range(VOCAB):
            seen = t in prompt or t in output
            want[i + 1, t] = scalar(float(logits[i + 1, t]), params, seen, output.count(t))
    penalise(logits, jobs)
    torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("factor", [1e-300, 1e-40, 1e40, 1e300])
def test_extreme_repetition_penalties_give_no_nan_and_no_infinity_above(factor: float) -> None:
    logits = torch.tensor([[5.0, 0.0, -5.0, -torch.inf]])
    penalise(logits, [Penalised(0, SamplingParams(repetition_penalty=factor), TokenHistory(range(4), 4))])
    assert not logits.isnan().any() and logits.max() < torch.inf
    assert logits[0, 3] == -torch.inf


def test_bias_and_ban_touch_their_rows_only() -> None:
    logits = torch.zeros(3, VOCAB)
    add_bias(logits, [(0, valid_ids([19], VOCAB), np.array([2.5], np.float32))])
    ban(logits, [(2, valid_ids([0, 3], VOCAB)), (1, valid_ids([], VOCAB))])
    want = torch.zeros(3, VOCAB)
    want[0, 19] = 2.5
    want[2, [0, 3]] = -torch.inf
    assert torch.equal(logits, want)


def test_valid_ids_drops_what_is_not_in_the_vocabulary() -> None:
    assert valid_ids([3, -1, 20, 3, 19, 10**12], VOCAB).tolist() == [3, 19]


def test_which_parameters_need_a_history() -> None:
    assert not has_penalties(SamplingParams(logit_bias=((1, 2.0),), min_tokens=4))
    for name, value in (("repetition_penalty", 1.1), ("presence_penalty", -1.0), ("frequency_penalty", 0.1)):
        assert has_penalties(SamplingParams(**{name: value}))

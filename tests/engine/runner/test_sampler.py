from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.runner.random import choice_seed, uniform
from engine.runner.sampler import Fault, Sampler
from engine.types import NewSequence, SamplingParams

torch.set_num_threads(1)
VOCAB = 50
EOS = frozenset({2, 30})
CPU = torch.device("cpu")
PROMPT = (1, 2, 3, 3)


def params(**kw: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, **kw})


def sampler(*sequences: SamplingParams, prompt: tuple[int, ...] = PROMPT, seed: int = 7, vocab: int = VOCAB) -> Sampler:
    """Sequences 0, 1, ... with these parameters and seeds 7, 8, ..."""
    s = Sampler(vocab, CPU)
    for i, p in enumerate(sequences):
        s.add(NewSequence(i, p, seed + i, prompt, end_ids=EOS | p.stop_token_ids if p.min_tokens else frozenset()))
    return s


def row(**logits: float) -> Tensor:
    """row(t5=2.0): logit 2 for token 5, falling slightly with the id elsewhere from -1."""
    x = -1.0 - torch.arange(VOCAB) / 1000
    for name, value in logits.items():
        x[int(name[1:])] = value
    return x[None]


def ids(result: Sequence[tuple[int, object]]) -> list[int]:
    return [t for t, _ in result]


def run(s: Sampler, x: Tensor, steps: int, seq_id: int = 0) -> list[int]:
    """Generate from a model that always says x."""
    return [ids(s.sample([seq_id], [len(PROMPT) + i], x.clone()))[0] for i in range(steps)]


def noise(rows: int, seed: int = 0, scale: float = 2.0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# --- the whole chain against a scalar oracle -------------------------------------------------------------------


def oracle(raw: list[float], p: SamplingParams, prompt: list[int], output: list[int], u: float) -> set[int]:
    """The tokens that may be chosen, in float64, one token at a time; several only where u or a cut lies within
    float32 noise of a boundary."""
    x = list(raw)
    for t, b in p.logit_bias:
        x[t] += b
    if len(output) < p.min_tokens:
        for t in EOS | p.stop_token_ids:
            x[t] = -math.inf
    for t in range(len(x)):
        if t in prompt or t in output:
            x[t] = x[t] / p.repetition_penalty if x[t] > 0 else x[t] * p.repetition_penalty
        x[t] -= p.presence_penalty * (t in output) + p.frequency_penalty * output.count(t)
    order = sorted(range(len(x)), key=lambda t: (-x[t], t))
    if p.temperature < 1e-5 or p.top_k == 1:
        return {t for t in order if x[order[0]] - x[t] < 1e-5}
    w = [math.exp((v - x[order[0]]) / p.temperature) for v in x]
    kept = order[: p.top_k] if 0 < p.top_k < len(x) else list(order)
    allowed: set[int] = set()
    for nudge in (-5e-6, 1e-6):
        cut = list(kept)
        if p.top_p < 1.0:
            mass, total, cut = math.fsum(w[t] for t in kept), 0.0, []
            for t in kept:
                cut.append(t)
                total += w[t]
                if total >= (p.top_p + nudge) * mass:
                    break
        cut = [t for t in cut if w[t] >= p.min_p + nudge * (p.min_p > 0)] or order[:1]
        filtered = 0 < p.top_k < len(x) or p.top_p < 1.0 or p.min_p > 0
        walk, mass, total = cut if filtered else sorted(cut), math.fsum(w[t] for t in cut), 0.0
        for t in walk:
            if w[t] > 0 and total / mass - 1e-5 <= u <= (total + w[t]) / mass + 1e-5:
                allowed.add(t)
            total += w[t]
    # Near-ties may swap ranks: any token within float32 noise of an allowed one will do.
    return {t for t in order for a in allowed if abs(x[t] - x[a]) < 1e-5}


sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.01, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 20, VOCAB, 9_999_999]),
    top_p=st.sampled_from([1.0, 1e-9, 0.5, 0.95]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=3).map(
        lambda d: tuple(d.items())
    ),
    logprobs=st.sampled_from([None, None, 0, 3]),
)


@settings(max_examples=100, deadline=None)
@given(
    batch=st.lists(st.tuples(sampling, st.lists(st.integers(0, VOCAB - 1), max_size=8)), min_size=1, max_size=5),
    seed=st.integers(0, 2**64 - 1),
)
def test_equals_the_scalar_oracle_over_several_steps(batch: list[tuple[SamplingParams, list[int]]], seed: int) -> None:
    s = Sampler(VOCAB, CPU)
    for i, (p, prompt) in enumerate(batch):
        end_ids = EOS | p.stop_token_ids if p.min_tokens else frozenset()
        s.add(NewSequence(i, p, choice_seed(seed, i), tuple(prompt), end_ids=end_ids))
    outputs: list[list[int]] = [[] for _ in batch]
    for step in range(5):
        raw = noise(len(batch), seed % 1000 + step)
        positions = [len(prompt) + step for _, prompt in batch]
        got = s.sample(range(len(batch)), positions, raw.clone())
        for i, (p, prompt) in enumerate(batch):
            token, logprob = got[i]
            u = float(uniform([choice_seed(seed, i)], [positions[i]])[0])
            assert token in oracle(raw[i].double().tolist(), p, prompt, outputs[i], u)
            assert (logprob is None) is (p.logprobs is None)
            if logprob is not None:
                want = float(raw[i].double().log_softmax(-1)[token])
                assert logprob.token_id == token and logprob.logprob == pytest.approx(want, abs=1e-5)
            outputs[i].append(token)


@pytest.mark.parametrize(
    "kw",
    [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 10},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_chi_square_of_twenty_thousand_draws(kw: dict[str, Any]) -> None:
    n, p = 20_000, params(**kw)
    x = noise(1, 11, 1.0)
    draws = ids(sampler(p).sample([0] * n, range(4, 4 + n), x.expand(n, -1).contiguous()))
    probs = (x[0].double() / p.temperature).softmax(-1)
    order = probs.argsort(descending=True)
    ranked = probs[order]
    if p.top_k:
        ranked[p.top_k :] = 0
    ranked = torch.where(ranked.cumsum(-1) - ranked < p.top_p * ranked.sum(), ranked, 0.0)
    ranked = torch.where(ranked >= p.min_p * ranked[0], ranked, 0.0)
    want = (ranked / ranked.sum() * n).numpy()
    have = np.bincount(draws, minlength=VOCAB)[order.numpy()]
    assert have[want == 0].sum() == 0
    want, have = want[want > 0], have[want > 0]
    chi2, freedom = float(((have - want) ** 2 / want).sum()), len(want) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


# --- independence ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [VOCAB, 6001])
def test_neighbours_change_nothing(vocab: int) -> None:
    mix = [
        params(),
        params(temperature=1.0),
        params(temperature=0.8, top_k=5),
        params(temperature=0.8, top_k=45, top_p=0.9, logprobs=3),
        params(temperature=1.3, top_p=0.99, repetition_penalty=1.3),
        params(temperature=1.0, min_p=0.05, logprobs=0),
        params(repetition_penalty=2.0, logprobs=5),
        params(temperature=1.0, frequency_penalty=1.0, min_tokens=3, logit_bias=((9, 3.0),)),
    ] * 4
    n = len(mix)
    alone, together = sampler(*mix, vocab=vocab), sampler(*mix, vocab=vocab)
    generator = torch.Generator().manual_seed(5)
    for step in range(4):
        x = noise(n, step, vocab=vocab)
        want = [alone.sample([i], [4 + step], x[i : i + 1].clone())[0] for i in range(n)]
        order = torch.randperm(n, generator=generator).tolist()
        got = together.sample(order, [4 + step] * n, x[order])
        assert got == [want[i] for i in order]


def test_restart_gives_the_same_tokens() -> None:
    p = params(temperature=1.0, top_p=0.9, presence_penalty=0.5)
    assert run(sampler(p), noise(1), 30) == run(sampler(p), noise(1), 30)


def test_choices_of_one_request_differ() -> None:
    s = Sampler(VOCAB, CPU)
    for i in range(8):
        s.add(NewSequence(i, params(temperature=1.2), choice_seed(5, i), PROMPT))
    x = noise(1)
    texts = [tuple(run(s, x, 12, i)) for i in range(8)]
    assert len(set(texts)) == 8
    first = ids(s.sample(range(8), [4] * 8, x.expand(8, -1).contiguous()))
    assert len(set(first)) > 1 and first == [t[0] for t in texts]


# --- parameters at their edges ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("kw", [{}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}])
def test_tiny_temperatures_are_greedy_and_never_nan(temperature: float, kw: dict[str, Any]) -> None:
    x = row(t9=30.0, t8=28.0, t7=-1e30, t6=-math.inf)
    assert run(sampler(params(temperature=temperature, **kw)), x, 5) == [9] * 5


def test_batch_of_all_tiny_temperatures() -> None:
    temperatures = [0.0, 1e-3, 1e-4, 1e-6, 1e-12, 5e-324]
    s = sampler(*(params(temperature=t) for t in temperatures))
    assert ids(s.sample(range(6), [4] * 6, row(t9=30.0, t8=28.0).expand(6, -1).contiguous())) == [9] * 6


def test_top_k_off_in_all_its_forms() -> None:
    x = noise(1, 3)
    forms = [params(temperature=1.0, top_k=k) for k in (0, VOCAB, VOCAB + 1, 9_999_999)]
    texts = {
        tuple(run(sampler(p), x, 40)) for p in (*forms, params(temperature=1.0), params(temperature=1.0, top_p=1.0))
    }
    assert len(texts) == 1
    assert len(set(texts.pop())) > 5


@pytest.mark.parametrize("kw", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_filters_that_leave_one_token_are_greedy(kw: dict[str, Any]) -> None:
    x = noise(1, 4)
    assert run(sampler(params(temperature=1.5, **kw)), x, 20) == [int(x.argmax())] * 20


@pytest.mark.parametrize("kw", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"temperature": 0.0}])
def test_exact_ties_go_to_the_lowest_id(kw: dict[str, Any]) -> None:
    p = params(**{"temperature": 1.0, **kw})
    assert run(sampler(p), row(t41=5.0, t17=5.0, t30=5.0), 8) == [17] * 8


def test_top_k_keeps_the_lower_ids_of_a_tie() -> None:
    assert set(run(sampler(params(temperature=1.0, top_k=3)), torch.zeros(1, VOCAB), 60)) == {0, 1, 2}


@pytest.mark.parametrize(("num_tied", "top_p", "kept"), [(4, 0.5, 2), (50, 0.1, 5), (50, 0.9, 45), (5, 0.6, 3)])
def test_top_p_keeps_the_fewest_lower_ids_of_a_tie(num_tied: int, top_p: float, kept: int) -> None:
    x = torch.full((1, VOCAB), -math.inf)
    x[0, :num_tied] = 0.0
    assert set(run(sampler(params(temperature=1.0, top_p=top_p)), x, 400)) == set(range(kept))


def test_mixed_batch_of_greedy_and_top_k() -> None:
    s = sampler(params(), params(temperature=1.0, top_k=5), params())
    x = noise(3, 9)
    got = ids(s.sample([0, 1, 2], [4] * 3, x.clone()))
    assert got[0] == int(x[0].argmax()) and got[2] == int(x[2].argmax())
    assert got[1] in x[1].topk(5).indices.tolist()


# --- bias, min_tokens, penalties -------------------------------------------------------------------------------


def test_logit_bias_steers_and_does_not_reach_the_logprobs() -> None:
    x = row(t5=2.0)
    plain = sampler(params(logprobs=2)).sample([0], [4], x.clone())[0]
    assert plain[0] == 5
    token, logprob = sampler(params(logprobs=2, logit_bias=((7, 100.0), (5, -100.0)))).sample([0], [4], x.clone())[0]
    assert token == 7 and logprob is not None and plain[1] is not None
    assert logprob.top[:2] == plain[1].top
    assert logprob.logprob == pytest.approx(float(x[0].log_softmax(-1)[7]), abs=1e-5)
    assert logprob.top[2] == (7, logprob.logprob)


def test_ids_outside_the_vocabulary_touch_no_neighbour() -> None:
    wild = params(logit_bias=((VOCAB + 5, 100.0), (-3, 100.0)), min_tokens=5, stop_token_ids=frozenset({VOCAB + 9}))
    s = Sampler(VOCAB, CPU)
    s.add(NewSequence(0, replace(wild, repetition_penalty=2.0), 0, (1, VOCAB + 12, 10**9), end_ids=EOS | {VOCAB + 9}))
    s.add(NewSequence(1, params(), 0, PROMPT))
    x = row(t12=3.0)
    assert ids(s.sample([0, 1], [3, 4], x.expand(2, -1).contiguous())) == [12, 12]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_every_eos_and_stop_id(temperature: float) -> None:
    x = row(t30=20.0, t2=19.0, t11=18.0, t40=17.0, t41=1.0)
    p = params(temperature=temperature, min_tokens=3, stop_token_ids=frozenset({11}))
    first = run(sampler(p), x, 4)
    assert not {2, 30, 11} & set(first[:3])
    assert run(sampler(params(min_tokens=3, stop_token_ids=frozenset({11}))), x, 4) == [40, 40, 40, 30]
    assert run(sampler(params(ignore_eos=True)), x, 1) == [30]  # ignored by the scheduler, not forbidden


def test_min_tokens_with_every_token_banned_falls_back_to_the_raw_best() -> None:
    every = frozenset(range(VOCAB))
    for temperature in (0.0, 1.0):
        s = sampler(params(temperature=temperature, min_tokens=2, stop_token_ids=every), params())
        assert ids(s.sample([0, 1], [4, 4], torch.cat([row(t6=3.0), row(t8=1.0)]))) == [6, 8]


def test_prompt_counts_for_repetition_only() -> None:
    """The prompt's best token loses to a repetition penalty at once, to the others only after it is said."""
    x = row(t3=4.0, t9=3.0, t8=2.5)
    assert run(sampler(params(repetition_penalty=2.0)), x, 4) == [9, 8, 3, 3]
    assert run(sampler(params(presence_penalty=2.0)), x, 4) == [3, 9, 8, 3]
    assert run(sampler(params(frequency_penalty=1.25)), x, 4) == [3, 9, 3, 8]


def test_a_step_run_again_gives_the_same_and_forgets_what_followed() -> None:
    p = params(temperature=1.0, frequency_penalty=2.0, repetition_penalty=1.2, min_tokens=6)
    s, x = sampler(p), noise(1, 2)
    first = run(s, x, 12)
    again = [ids(s.sample([0], [4 + i], x.clone()))[0] for i in range(5, 12)]
    assert again == first[5:]
    assert run(s, x, 12) == first


def test_a_gap_in_the_history_is_an_error_only_where_penalties_need_it() -> None:
    s = sampler(params(presence_penalty=1.0), params(temperature=1.0))
    fault, (token, _) = s.sample([0, 1], [9, 9], noise(2))
    assert isinstance(fault, Fault) and "position 9, but only the output up to position 4" in fault.reason
    assert 0 <= token < VOCAB


def test_forget_and_add_again() -> None:
    s = sampler(params(presence_penalty=2.0), params())
    x = row(t3=4.0, t9=3.0)
    assert run(s, x, 2) == [3, 9]
    s.forget([0, 99])
    with pytest.raises(KeyError):
        s.sample([0], [4], x.clone())
    s.add(NewSequence(0, params(presence_penalty=2.0), 0, PROMPT))
    assert run(s, x, 2) == [3, 9]


# --- logprobs and failures -------------------------------------------------------------------------------------


def test_logprobs_only_for_rows_that_ask() -> None:
    s = sampler(params(), params(logprobs=0), params(logprobs=3, temperature=1.0))
    got = s.sample([0, 1, 2], [4] * 3, noise(3))
    assert got[0][1] is None
    assert got[1][1] is not None and got[1][1].top == ()
    entry = got[2][1]
    assert entry is not None and dict(entry.top)[got[2][0]] == entry.logprob
    assert [lp for _, lp in entry.top] == sorted((lp for _, lp in entry.top), reverse=True)


def test_logprobs_under_top_k_one_and_low_temperature_are_the_models_own() -> None:
    x = row(t5=3.0, t6=-math.inf)
    ((token, entry),) = sampler(params(temperature=0.01, top_k=1, logprobs=VOCAB)).sample([0], [4], x.clone())
    assert token == 5 and entry is not None
    assert entry.logprob == pytest.approx(float(x[0].log_softmax(-1)[5]), abs=1e-5)
    assert all(math.isfinite(lp) for _, lp in entry.top)
    assert entry.top[-1] == (6, -9999.0)


def test_prompt_logprobs() -> None:
    x = noise(3, 8)
    got = Sampler(VOCAB, CPU).prompt_logprobs(x, [4, 5, 6], 2)
    want = x.log_softmax(-1)
    for i, entry in enumerate(got):
        assert entry.token_id == 4 + i
        assert entry.logprob == pytest.approx(float(want[i, 4 + i]), abs=1e-5)
        assert [t for t, _ in entry.top][:2] == x[i].topk(2).indices.tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kw", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_unusable_logits_are_a_fault_of_their_sequence_alone(bad: float, kw: dict[str, Any]) -> None:
    s = sampler(params(), params(**kw))
    x = noise(2)
    x[1, 17] = bad
    [(alone, _)] = s.sample([0], [4], x[:1].clone())
    good, fault = s.sample([0, 1], [4, 4], x)
    assert good == (alone, None)
    assert isinstance(fault, Fault) and "not finite" in fault.reason


def test_logits_that_allow_nothing_are_a_fault_of_their_sequence() -> None:
    [fault] = sampler(params()).sample([0], [4], torch.full((1, VOCAB), -math.inf))
    assert isinstance(fault, Fault)


def test_nothing_to_sample() -> None:
    assert sampler().sample([], [], torch.zeros(0, VOCAB)) == []

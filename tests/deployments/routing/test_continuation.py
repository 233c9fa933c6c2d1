"""An answer that goes on elsewhere, cut anywhere, is the answer that was not cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from helpers_gateway import demo_text
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.routing.continuation import Continuation
from engine.runner.random import choice_seed, uniform
from engine.text import TextStream
from engine.types import FinishReason, GenerateRequest, SamplingParams, Timings, TokenDelta, TokenLogprob

PARAMS = SamplingParams(max_tokens=12, seed=7)
PIECES = [*demo_text().tokenizer.encode("aab aaab héllo 🦉🦉 wörld. Count: 1, 2, 3\n"), 0, 2, 10813, 116, 227]


def engine(request: GenerateRequest) -> Iterator[TokenDelta]:
    """What an engine gives: each token a function of seed and position, text by the real TextStream."""
    params, num_prompt = request.sampling, len(request.prompt) - request.resumed_tokens
    assert params.n == 1 or not request.resumed_tokens
    for index in range(params.n):
        seed = choice_seed(params.seed or 0, index)
        text = TextStream(demo_text().tokenizer, params)
        for token in request.prompt[num_prompt:]:
            assert not text.push(token, None, False)
        reason = None
        for count in range(request.resumed_tokens + 1, params.max_tokens + 1):
            token = PIECES[int(uniform([seed], [num_prompt + count - 1])[0] * len(PIECES))]
            entry = None if params.logprobs is None else TokenLogprob(token, -float(count))
            stopped = text.push(token, entry, False)
            if stopped or count == params.max_tokens:
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                text.finish()
            released, entries = text.take()
            yield TokenDelta(
                request.request_id,
                index,
                (token,),
                released,
                entries,
                finish_reason=reason,
                num_prompt_tokens=num_prompt,
                num_cached_tokens=5 if request.resumed_tokens else 1,
                num_completion_tokens=count,
            )
            if reason:
                break


def play(
    requests: list[GenerateRequest], cuts: list[int], fault: bool = False
) -> dict[tuple[str, int], list[TokenDelta]]:
    """All deltas a client gets when the replica is lost after so many deltas of each attempt."""
    journey, got = Continuation(requests), dict[tuple[str, int], list[TokenDelta]]()
    for cut in [*cuts, 10**6]:
        if journey.complete:
            break
        asked = journey.rest(0.0)
        streams = [engine(request) for request in asked]
        given = 0
        while streams and given < cut:
            stream = streams.pop(0)
            if (delta := next(stream, None)) is not None:
                streams.append(stream)
                given += 1
                fresh, bad = journey.take([delta])
                assert bad is None
                for new in fresh:
                    got.setdefault((new.request_id, new.index), []).append(new)
        if fault and not journey.complete:
            last = TokenDelta(asked[0].request_id, 0, (), "half a character", finish_reason=FinishReason.ABORT)
            fresh, bad = journey.take([last])
            assert not fresh and bad is last
    assert journey.complete
    return got


def told(deltas: list[TokenDelta]) -> tuple[object, ...]:
    last = deltas[-1]
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    return (
        tuple(t for d in deltas for t in d.token_ids),
        "".join(d.text for d in deltas),
        tuple(entry for d in deltas for entry in d.logprobs),
        last.finish_reason,
        last.num_completion_tokens,
        last.num_prompt_tokens,
        last.num_cached_tokens,
    )


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 30), max_size=4),
    seed=st.integers(0, 2**63),
    n=st.integers(1, 3),
    stop=st.sampled_from([(), ("aab",), ("🦉",), ("b a", "llo"), ("1, 2",)]),
    logprobs=st.sampled_from([None, 0]),
    min_tokens=st.integers(0, 6),
    fault=st.booleans(),
)
def test_cut_anywhere_it_is_the_same_answer(
    cuts: list[int], seed: int, n: int, stop: tuple[str, ...], logprobs: int | None, min_tokens: int, fault: bool
) -> None:
    params = replace(PARAMS, seed=seed, n=n, stop=stop, logprobs=logprobs, min_tokens=min_tokens)
    requests = [GenerateRequest("p", (5, 6, 7), params), GenerateRequest("q", (9,), params)]
    whole, cut = play(requests, []), play(requests, cuts, fault)
    assert {key: told(deltas) for key, deltas in cut.items()} == {key: told(deltas) for key, deltas in whole.items()}


def test_without_a_seed_one_is_chosen_and_kept() -> None:
    request = GenerateRequest("r", (1,), replace(PARAMS, seed=None))
    journey = Continuation([request])
    [first] = journey.rest(0.0)
    assert first.sampling.seed is not None and first.request_id == "r"
    [again] = journey.rest(0.0)
    assert again.sampling.seed == first.sampling.seed and again.request_id != "r"
    journey.take([TokenDelta(again.request_id, 0, (4,), "x", num_completion_tokens=1)])
    [resumed] = journey.rest(0.0)
    assert resumed.sampling.seed == first.sampling.seed
    assert resumed.prompt == (1, 4) and resumed.resumed_tokens == 1
    assert Continuation([request]).rest(0.0)[0].sampling.seed != first.sampling.seed


def test_deadlines_shrink_and_end_with_the_first_token() -> None:
    journey = Continuation([replace(GenerateRequest("r", (1,), PARAMS), deadline_s=10.0)])
    assert [r.deadline_s for r in journey.rest(0.0)] == [10.0]
    [later] = journey.rest(4.0)
    assert later.deadline_s == 6.0
    journey.take([TokenDelta(later.request_id, 0, (4,), "x")])
    assert journey.rest(30.0)[0].deadline_s is None


def test_prompt_logprobs_are_asked_for_until_the_client_has_them() -> None:
    params = replace(PARAMS, n=2, prompt_logprobs=1)
    journey = Continuation([GenerateRequest("r", (1, 2), params)])
    [asked] = journey.rest(0.0)
    journey.take([TokenDelta(asked.request_id, 1, (4,), "x")])
    assert [r.sampling.prompt_logprobs for r in journey.rest(0.0)] == [1, None]
    [one, _] = journey.rest(0.0)
    journey.take([TokenDelta(one.request_id, 0, (4,), "x")])
    assert [r.sampling.prompt_logprobs for r in journey.rest(0.0)] == [None, None]


def test_what_came_first_stays_in_the_timings() -> None:
    journey = Continuation([GenerateRequest("r", (1,), PARAMS)])
    [asked] = journey.rest(0.0)
    journey.take([TokenDelta(asked.request_id, 0, (4,), "x", timings=Timings(1.0, 2.0, 0.0))])
    [resumed] = journey.rest(0.0)
    end = TokenDelta(
        resumed.request_id, 0, (5,), "xy", finish_reason=FinishReason.LENGTH, timings=Timings(7.0, 8.0, 9.0)
    )
    [fresh], _ = journey.take([end])
    assert fresh.timings == Timings(1.0, 2.0, 9.0) and fresh.text == "y" and fresh.request_id == "r"


def test_an_error_of_the_engine_is_kept_from_the_client() -> None:
    journey = Continuation([GenerateRequest("r", (1,), PARAMS)])
    journey.rest(0.0)
    fault = TokenDelta("r", 0, (), "", finish_reason=FinishReason.ERROR, error="boom")
    assert journey.take([fault]) == ([], fault)
    assert not journey.started and not journey.complete


def test_ids_nobody_asked_for_are_a_fault_of_ours() -> None:
    with pytest.raises(KeyError):
        Continuation([GenerateRequest("r", (1,), PARAMS)]).take([TokenDelta("x")])

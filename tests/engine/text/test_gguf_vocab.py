from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelFileError
from engine.text import Tokenizer
from engine.text.gguf_vocab import PRE_TOKENIZERS, build_vocabulary
from engine.text.vocabulary import BYTE_LETTERS

LETTER = {b: c for c, b in BYTE_LETTERS.items()}


def spelt(text: str) -> str:
    return "".join(LETTER[b] for b in text.encode())


def byte_level(pre: str = "gpt-2", merges: tuple[tuple[str, str], ...] = (), **keys: Any) -> dict[str, Any]:
    """3 control tokens, 256 letters, then what the merges make, one user-defined token last."""
    made = [spelt(a) + spelt(b) for a, b in merges]
    tokens = ["<bos>", "<eos>", "<|eot_id|>", *LETTER.values(), *made, "<think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(tokens) - 4), 4],
        "tokenizer.ggml.merges": [f"{spelt(a)} {spelt(b)}" for a, b in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    } | {f"tokenizer.ggml.{k}": v for k, v in keys.items()}


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text)]


def load(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(build_vocabulary(metadata, "x.gguf"))


@settings(max_examples=30)
@given(text=st.text())
@pytest.mark.parametrize("pre", [p for p in PRE_TOKENIZERS if not PRE_TOKENIZERS[p].nfc])
def test_every_byte_survives(pre: str, text: str) -> None:
    tokenizer = TOKENIZERS[pre]
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, parse_special=False))) == text.encode()
    assert tokenizer.min_tokens_of(text) <= len(tokenizer.encode(text))


TOKENIZERS = {pre: load(byte_level(pre, add_bos_token=False)) for pre in PRE_TOKENIZERS}

DIGITS = (("1", "2"), ("12", "3"), ("123", "4"), (" ", "1"), (" ", " "))


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "1234", ["1234"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("dbrx", "1234", ["123", "4"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("tekken", "1234", ["1", "2", "3", "4"]),
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("gpt-2", "  1", [" ", " 1"]),
        ("smollm", "  1", ["  ", "1"]),
        ("qwen2", "  1", [" ", " ", "1"]),
    ],
)
def test_digits_are_cut_as_the_model_learned_them(pre: str, text: str, expected: list[str]) -> None:
    assert words(load(byte_level(pre, DIGITS, add_bos_token=False)), text) == expected


def test_ignore_merges_takes_a_whole_word() -> None:
    # "ab" is a token, but no sequence of merges leads from "a", "b", "c" to "abc".
    metadata = byte_level("llama-bpe", (("a", "b"),), add_bos_token=False)
    metadata["tokenizer.ggml.tokens"].insert(-1, "abc")
    metadata["tokenizer.ggml.token_type"].insert(-1, 1)
    assert words(load(metadata), "abc") == ["abc"]
    assert words(load(metadata | {"tokenizer.ggml.pre": "gpt-2"}), "abc") == ["ab", "c"]


def test_nfc_only_where_the_original_has_it() -> None:
    decomposed = "e\u0301"
    assert TOKENIZERS["qwen2"].decode(TOKENIZERS["qwen2"].encode(decomposed)) == "é"
    assert TOKENIZERS["llama-bpe"].decode(TOKENIZERS["llama-bpe"].encode(decomposed)) == decomposed
    assert TOKENIZERS["qwen2"].min_tokens_of(decomposed * 100) <= len(TOKENIZERS["qwen2"].encode(decomposed * 100))


def test_bos_default_depends_on_the_family() -> None:
    assert load(byte_level("llama-bpe")).encode("a")[0] == 0
    assert load(byte_level("gpt-2")).encode("a")[0] != 0
    assert load(byte_level("gpt-2", add_bos_token=True)).encode("a")[0] == 0


def test_user_defined_tokens_are_whole_but_not_special() -> None:
    tokenizer = TOKENIZERS["gpt-2"]
    ids = tokenizer.encode("a<think>b", parse_special=False)
    assert len(ids) == 3
    assert not tokenizer.is_special(ids[1])
    assert tokenizer.decode(ids) == "a<think>b"


def test_turn_enders_end_too() -> None:
    assert load(byte_level()).eos_ids == {1, 2}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"tokens": []}, "tokens"),
        ({"token_type": [1]}, "token_type"),
        ({"pre": "klingon"}, "pre"),
        ({"model": "bert"}, "model"),
        ({"merges": ["a zz"]}, "merges"),
        ({"merges": ["ab"]}, "merges"),
        ({"bos_token_id": 10**6}, "bos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
    ],
)
def test_bad_metadata_names_file_and_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelFileError, match=rf"x\.gguf: key 'tokenizer\.ggml\.{key}'"):
        load(byte_level() | {f"tokenizer.ggml.{k}": v for k, v in change.items()})


PIECES = ["\u2581", "a", "b", "c", "ab", "bc", "\u2581a", "abc", "\u2581ab", "cab", "\u2581\u2581"]


def sentencepiece(**keys: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float((i * 7) % 11) for i in range(len(PIECES))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{k}": v for k, v in keys.items()}


def by_score(text: str) -> list[str]:
    """SentencePiece's rule, done slowly: merge the adjacent pair that makes the best-scored piece, leftmost first."""
    scores = {p: -float((i * 7) % 11) for i, p in enumerate(PIECES)}
    symbols = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


SENTENCEPIECE = load(sentencepiece())
NO_PREFIX = load(sentencepiece(add_space_prefix=False, add_bos_token=False))


@given(text=st.text("abc ", max_size=12))
def test_sentencepiece_merges_by_score(text: str) -> None:
    got = [NO_PREFIX.token_text(i).replace(" ", "\u2581") for i in NO_PREFIX.encode(text)]
    assert got == by_score(text.replace(" ", "\u2581"))


@given(text=st.text())
def test_sentencepiece_round_trip(text: str) -> None:
    assert NO_PREFIX.decode(NO_PREFIX.encode(text, parse_special=False)) == text.replace("\u2581", " ")
    assert NO_PREFIX.min_tokens_of(text) <= len(NO_PREFIX.encode(text))


def test_sentencepiece_details() -> None:
    assert SENTENCEPIECE.encode("ab")[0] == 1
    assert SENTENCEPIECE.decode(SENTENCEPIECE.encode("ab")) == " ab"
    assert words(NO_PREFIX, "é") == ["\ufffd", "\ufffd"]
    assert [NO_PREFIX.token_bytes(i) for i in NO_PREFIX.encode("é")] == [b"\xc3", b"\xa9"]
    assert NO_PREFIX.encode("</s>") == [2]
    assert not any(map(NO_PREFIX.is_special, NO_PREFIX.encode("</s>", parse_special=False)))
    # A byte token spelt out is text, not the byte.
    assert NO_PREFIX.decode(NO_PREFIX.encode("<0x41>")) == "<0x41>"


def test_sentencepiece_needs_scores() -> None:
    with pytest.raises(ModelFileError, match="scores"):
        load(sentencepiece(scores=[0.0]))


def test_a_file_that_does_not_say_its_rule_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_level()
    del metadata["tokenizer.ggml.pre"]
    load(metadata)
    assert "x.gguf: no key 'tokenizer.ggml.pre'" in caplog.text

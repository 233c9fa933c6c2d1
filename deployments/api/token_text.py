"""Tokens as text, for logprobs and echo: one token by one, where a character may be spread over several."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from engine.text import TextModel


def token_bytes(text: TextModel, token_id: int) -> bytes:
    """Never empty: a special token is spelled out."""
    return text.tokenizer.token_bytes(token_id) or text.tokenizer.token_text(token_id).encode()


def token_string(raw: bytes) -> str:
    r"""A token as a string. One that is not whole characters becomes `bytes:\xf0\x9f`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Offsets:
    """Where each token begins in the text, in characters, fed one token at a time. A token in the middle of a
    character begins where that character does. Special tokens take no room when `skip_special`."""

    def __init__(self, text: TextModel, skip_special: bool) -> None:
        self._text = text
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = 0

    def next(self, token_id: int) -> int:
        """Where this token begins, and the one after it will."""
        at = self._chars
        if not (self._skip_special and self._text.tokenizer.is_special(token_id)):
            self._chars += len(self._decoder.decode(token_bytes(self._text, token_id)))
        return at


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is repeated in front of a completion. `held`: the bytes of a last character that it does not
    complete; the completion's text begins with them, so that both together are what all tokens decode to."""

    ids: tuple[int, ...]
    text: str
    held: bytes


def echo(text: TextModel, ids: Sequence[int], skip_special: bool) -> Echo:
    """The prompt of these token ids; its text without special tokens if `skip_special`."""
    kept = (i for i in ids if not (skip_special and text.tokenizer.is_special(i)))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    shown = decoder.decode(b"".join(token_bytes(text, i) for i in kept))
    return Echo(tuple(ids), shown, decoder.getstate()[0])

"""What a tokenizer's files say, whatever their format, and the raw bytes behind token strings."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Read by gguf_vocab or hf_vocab, consumed by Tokenizer.

    `pieces[id]` is the exact bytes of a token. `unspelled`: the byte values that no token can spell, which vanish in
    encoding; None if not only bytes but whole words may. `add_bos`: plain prompts begin with `bos_id`. `eos_id` is what
    chat templates write as `eos_token`; each of `eos_ids` ends a text.
    """

    backend: tokenizers.Tokenizer
    pieces: tuple[bytes, ...]
    unspelled: bytes | None
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    chat_template: str | None


def _byte_letters() -> dict[str, int]:
    """The letter by which byte-level BPE writes each byte: itself where printable, else 256, 257, ..."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


BYTE_LETTERS = _byte_letters()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token. Text that the byte alphabet can't have written stands for itself."""
    try:
        return bytes([BYTE_LETTERS[c] for c in token])
    except KeyError:
        return token.encode()


def unspelled_bytes(tokens: Container[str]) -> bytes:
    """Byte values whose letter a byte-level vocabulary lacks."""
    return bytes(b for letter, b in BYTE_LETTERS.items() if letter not in tokens)


def sentencepiece_bytes(token: str) -> bytes:
    """Bytes of a SentencePiece token: <0xNN> is a byte, U+2581 a space."""
    if m := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(m[1], 16)])
    return token.replace("\u2581", " ").encode()

"""What a tokenizer's files say, whatever their format, and the raw bytes behind token strings."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import tokenizers

OTHER_NAMES = ("pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
"""What chat templates may call control tokens besides `bos_token` and `eos_token`."""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Read by gguf_vocab or hf_vocab, consumed by Tokenizer.

    `pieces[id]` is the exact bytes of a token. `unspelled`: the byte values that no token can spell, which vanish in
    encoding; None if not only bytes but whole words may. `add_bos`: plain prompts begin with `bos_id`. `eos_id` is what
    chat templates write as `eos_token`; each of `eos_ids` ends a text. `named` has the texts of other control tokens
    under the names that chat templates know them by, such as `pad_token`. `tool_template`: the chat template for
    requests with tools, where the model has one of its own for those.
    """

    backend: tokenizers.Tokenizer
    pieces: tuple[bytes, ...]
    unspelled: bytes | None
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    chat_template: str | None
    tool_template: str | None = None
    named: Mapping[str, str] = field(default_factory=dict)


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

"""Text to ids and ids to bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import tokenizers

from engine.errors import InvalidRequestError
from engine.text.gguf_vocab import read_gguf_vocabulary
from engine.text.hf_vocab import read_hf_vocabulary
from engine.text.vocabulary import Vocabulary


def load_tokenizer(path: Path | str) -> Tokenizer:
    """From a Hugging Face directory or a .gguf file. Raises ModelFileError."""
    return Tokenizer(read_vocabulary(Path(path)))


def read_vocabulary(path: Path) -> Vocabulary:
    """What load_tokenizer() makes a tokenizer from. Raises ModelFileError."""
    return read_hf_vocabulary(path) if path.is_dir() else read_gguf_vocabulary(path)


class Tokenizer:
    """Immutable after construction, so threads may share it; encoding runs without the interpreter lock.

    `special_tokens` maps the text of each control token to its id. `max_token_bytes` is the longest token's length.
    """

    def __init__(self, vocab: Vocabulary) -> None:
        self.bos_id = vocab.bos_id
        self.eos_ids = vocab.eos_ids
        self.eos_id = min(vocab.eos_ids, default=None) if vocab.eos_id is None else vocab.eos_id
        self.add_bos = vocab.add_bos and vocab.bos_id is not None
        self.vocab_size = len(vocab.pieces)
        self.max_token_bytes = max(map(len, vocab.pieces))
        self._pieces = vocab.pieces
        self._unspelled = vocab.unspelled
        self._named = dict(vocab.named)
        added = vocab.backend.get_added_tokens_decoder()
        specials = {i: t for i, t in added.items() if t.special}
        self._special_ids = frozenset(specials)
        self.special_tokens: Mapping[str, int] = MappingProxyType({t.content: i for i, t in specials.items()})
        self._strips_left = frozenset(i for i, t in specials.items() if t.lstrip)
        self._strips_right = frozenset(i for i, t in specials.items() if t.rstrip)
        self._any_strips = any(t.lstrip or t.rstrip for t in added.values())
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._special_re = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._backend = vocab.backend
        self._plain = _without_special(vocab.backend)
        self._plain_inner = _without_first_prefix(self._plain)

    @property
    def named_tokens(self) -> dict[str, str]:
        """Texts of control tokens, under the names that chat templates know them by."""
        return {**self._named, "bos_token": self.bos_token, "eos_token": self.eos_token}

    @property
    def bos_token(self) -> str:
        """Text of the BOS token; empty when there is none."""
        return "" if self.bos_id is None else self.token_text(self.bos_id)

    @property
    def eos_token(self) -> str:
        """Text of the tokenizer's own EOS token, or of the first that ends a text; empty when there is none."""
        return "" if self.eos_id is None else self.token_text(self.eos_id)

    def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Ids of a plain prompt, with BOS in front if the model wants one (never twice).

        `parse_special` False: control tokens spelt out in the text are ordinary text.
        """
        ids = self._ids(self._backend if parse_special else self._plain, text)
        return [self.bos_id, *ids] if self.bos_id is not None and self.add_bos and ids[:1] != [self.bos_id] else ids

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of text that already has all its control tokens: nothing is added."""
        return self._ids(self._backend, text)

    def encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        """Ids of split_special's pieces: strings are ordinary text, whatever they spell; ids are themselves."""
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            elif piece:
                ids += self._ids(self._plain_inner if ids else self._plain, piece)
        return ids

    def split_special(self, text: str) -> list[str | int]:
        """Cut `text` at its control tokens: strings and ids. Blanks that a control token swallows are gone."""
        pieces: list[str | int] = []
        pos = 0
        for start, end in self.find_special(text):
            token = self.special_tokens[text[start:end]]
            before = self._after_special(text[pos:start], pieces)
            pieces += [before.rstrip() if token in self._strips_left else before, token]
            pos = end
        return [*pieces, self._after_special(text[pos:], pieces)]

    def find_special(self, text: str, *, overlapping: bool = False) -> Iterable[tuple[int, int]]:
        """Spans of control tokens' text, from the left. `overlapping`: from every place where one begins."""
        pos = 0
        while m := self._special_re.search(text, pos):
            yield m.span()
            pos = m.start() + 1 if overlapping else m.end()

    def min_tokens_of(self, text: str) -> int:
        """A lower bound of len(encode(text)) at a fraction of the cost; 0 when none is known."""
        if self._unspelled is None:
            return 0
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text).replace("\u2581", " ")
        if self._any_strips:
            text = "".join(text.split())
        raw = text.encode(errors="surrogatepass").translate(None, self._unspelled)
        return -(-len(raw) // self.max_token_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's exact bytes. Control tokens give their text. Empty past the vocabulary (a padded head)."""
        return self._pieces[token_id] if token_id < len(self._pieces) else b""

    def token_text(self, token_id: int) -> str:
        """For display: partial characters show as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a control token, which decodes to no text."""
        return token_id in self._special_ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """All bytes joined, then read as UTF-8; what is not UTF-8 becomes U+FFFD."""
        kept = (i for i in ids if not (skip_special_tokens and i in self._special_ids))
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def _after_special(self, text: str, pieces: list[str | int]) -> str:
        return text.lstrip() if pieces and pieces[-1] in self._strips_right else text

    def _ids(self, backend: tokenizers.Tokenizer, text: str) -> list[int]:
        try:
            # Only the batch call releases the interpreter lock.
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:
            raise InvalidRequestError("text must be valid Unicode, but holds a lone surrogate") from None
        return ids


def _without_special(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A twin that takes control tokens for text. A twin because that switch is the instance's, not the call's."""
    added = backend.get_added_tokens_decoder()
    twin = tokenizers.Tokenizer(backend.model)  # shares the vocabulary
    if backend.normalizer is not None:
        twin.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        twin.pre_tokenizer = backend.pre_tokenizer
    for _, token in sorted(added.items()):
        (twin.add_special_tokens if token.special else twin.add_tokens)([token])
    if twin.get_added_tokens_decoder().keys() != added.keys():  # ids with gaps: only a full copy keeps them
        twin = tokenizers.Tokenizer.from_str(backend.to_str())
    twin.encode_special_tokens = True
    return twin


def _without_first_prefix(plain: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """For text after the first piece: the same, unless this tokenizer puts a prefix space before the first only."""
    if plain.pre_tokenizer is None or b'"prepend_scheme":"first"' not in plain.pre_tokenizer.__getstate__():
        return plain
    twin = tokenizers.Tokenizer.from_str(plain.to_str().replace('"prepend_scheme":"first"', '"prepend_scheme":"never"'))
    twin.encode_special_tokens = True
    return twin

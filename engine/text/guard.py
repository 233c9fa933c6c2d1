"""Keeps what a user typed from becoming control tokens.

Templates mix their own control tokens with message text in one string. Before rendering, a character of every
control token spelt out in a message is replaced by a secret number; whatever control tokens the rendered text then
holds were written by the template. The same goes for the ends of strings, where a control token could be pieced
together from a message and what the template, or another message, puts next to it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from engine.text.tokenizer import Tokenizer


class SpecialTokenGuard:
    """What depends on the vocabulary only; one per template. `for_call` gives the state of one rendering."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        tokens = tokenizer.special_tokens
        self.heads = frozenset(t[:i] for t in tokens for i in range(1, len(t)))
        self.tails = frozenset(t[i:] for t in tokens for i in range(1, len(t)))
        self.longest = max(map(len, tokens), default=0)
        self.joined = "\0".join(tokens)

    def for_call(self) -> Disguise:
        """A disguise with a secret of its own, for one rendering."""
        return Disguise(self)

    def weak_spots(self, text: str, whole: bool) -> set[int]:
        """Positions to disguise: where a control token begins, or could be completed from outside. `whole`: also if
        all of `text` lies inside a control token."""
        spots = {start for start, _ in self.tokenizer.find_special(text, overlapping=True)}
        core = text.strip()  # templates often trim
        start = text.find(core)
        reach = range(1, min(len(core) + 1, self.longest))
        if any(core[-k:] in self.heads for k in reach):
            spots.add(start + len(core) - 1)
        inside = whole and 0 < len(core) < self.longest and core in self.joined
        if inside or any(core[:k] in self.tails for k in reach):
            spots.add(start)
        return spots


class Disguise:
    """One rendering's secret. Digits only: they survive JSON, changes of case and trimming."""

    def __init__(self, guard: SpecialTokenGuard) -> None:
        self._guard = guard
        self._secret = f"{secrets.randbelow(10**24):024d}"
        self.end_mark = f"{secrets.randbelow(10**24):024d}"

    def hide(self, value: Any, whole: bool) -> Any:
        """A copy of strings, dicts and lists in which no string can make a control token.

        `whole`: not even by filling a gap that the template leaves inside one. False for strings that templates
        compare (options, kinds, schemas): such a word may well be a part of a control token.
        """
        if isinstance(value, str):
            return self._hide_text(value, whole)
        if isinstance(value, Mapping):
            return {self.hide(k, False): self.hide(v, whole and k != "type") for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(v, whole) for v in value]
        return value

    def reveal(self, text: str) -> str:
        """The text with what was hidden put back."""
        head, *rest = text.split(self._secret)
        return head + "".join(chr(int(part[:7])) + part[7:] for part in rest)

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text, with control tokens only where the template wrote them."""
        tokenizer = self._guard.tokenizer
        if self._secret not in text:
            return tokenizer.encode_rendered(text)
        pieces = tokenizer.split_special(text)
        return tokenizer.encode_pieces(p if isinstance(p, int) else self.reveal(p) for p in pieces)

    def _hide_text(self, text: str, whole: bool) -> str:
        spots = self._guard.weak_spots(text, whole)
        if not spots:
            return text
        return "".join(f"{self._secret}{ord(c):07d}" if i in spots else c for i, c in enumerate(text))

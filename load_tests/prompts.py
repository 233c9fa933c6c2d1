"""What prompts are made of: a unit (a word or a token id) drawn at random, many times over, from a seed.

A prompt is a row of segments; a segment's text depends on its name only, so that segments of one name are a shared
prefix and all others have nothing in common.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Common words: one token each in nearly every vocabulary.
_WORDS = (  # noqa: SIM905 - a list of two hundred literals would hide the words
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name president team minute idea "
    "kid body information back parent face others level office door health person art war history party result "
    "change morning reason research girl guy moment air teacher force education foot boy age policy music market "
    "sense nation plan college interest death experience effect use class control field development role effort "
    "rate heart drug show leader light voice wife police mind price report decision son view town road arm value"
).split()

# Ordinary tokens in nearly every vocabulary: special ones stand at its ends. A smaller vocabulary refuses the probe.
_IDS = [str(token_id) for token_id in range(1000, 30000)]

_CACHED_SEGMENTS = 4096


@dataclass(frozen=True, slots=True)
class Segment:
    """`shared`: other prompts have it too, so it is worth keeping."""

    key: str
    tokens: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """How prompts are written. A prompt of n units has `overhead` + n * `tokens_per_unit` tokens; `exact`: always,
    not about."""

    unit: Literal["id", "word"]
    tokens_per_unit: float = 1.0
    overhead: int = 0
    exact: bool = False

    def num_units(self, tokens: int) -> int:
        return max(1, round((tokens - self.overhead) / self.tokens_per_unit))


class PromptWriter:
    """Writes segments as JSON. The seed is part of every segment's name."""

    def __init__(self, form: Form, seed: int) -> None:
        self._form = form
        self._seed = seed
        self._separator = "," if form.unit == "id" else " "
        self._shared = functools.lru_cache(_CACHED_SEGMENTS)(self._units)

    def text(self, segments: Sequence[Segment]) -> str:
        """Units with separators between: words to read, or the inside of a JSON list. The overhead is taken off the
        whole, so that the shared beginning of two prompts stays the same."""
        last = self._form.num_units(sum(segment.tokens for segment in segments))
        pieces, start, tokens = [], 0, 0
        for segment in segments:
            tokens += segment.tokens
            end = min(last, round(tokens / self._form.tokens_per_unit))
            if end > start:
                units = self._shared if segment.shared else self._units
                pieces.append(units(segment.key, end - start))
                start = end
        return self._separator.join(pieces)

    def json(self, segments: Sequence[Segment]) -> bytes:
        return self.as_json(self.text(segments))

    def as_json(self, text: str) -> bytes:
        """Only for what text() gave: nothing in it needs escaping."""
        return (f"[{text}]" if self._form.unit == "id" else f'"{text}"').encode()

    def _units(self, key: str, count: int) -> str:
        """Fewer units of the same key are the beginning of more."""
        rng = random.Random(f"{self._seed}/{key}")
        return self._separator.join(rng.choices(_IDS if self._form.unit == "id" else _WORDS, k=count))

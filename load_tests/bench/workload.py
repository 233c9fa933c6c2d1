"""Prompts and arrival times, from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

# Common words: one token each in nearly every vocabulary. With random order no two prompts share a prefix.
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


def prompt(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=max(1, num_words)))


def poisson_arrivals(rng: random.Random, rate: float, count: int) -> Iterator[float]:
    """Seconds from the start at which each request is due; `rate` is requests per second."""
    at = 0.0
    for _ in range(count):
        yield at
        at += rng.expovariate(rate)


def words_for(num_tokens: int, sample_words: int, sample_tokens: int | None) -> int:
    """How many words make about `num_tokens` tokens, when `sample_words` made `sample_tokens` (None: unknown)."""
    ratio = sample_words / sample_tokens if sample_tokens else 1.0
    return max(1, round(num_tokens * min(ratio, 1.5)))

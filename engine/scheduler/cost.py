"""What a step takes, learnt from the steps themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# The weights follow a change within some ten steps and forget a disturbance as fast; the tests of learning hold them.
_WEIGHT = 0.1  # of the newest step that only decodes, in the average
_LESS_WEIGHT = 0.4  # the same if it is shorter than those before: what disturbs steps makes them longer
_PROMPT_WEIGHT = 0.4  # of the newest step with prompts
_MOST = 2.0  # one sample moves an estimate as if it were no more than this many times off
_UNITS = (1, 16, 1024, 16 * 1024)  # of _Features (steps, tokens, tokens, pairs): at these each weighs about the same
_Features = tuple[float, float, float, float]


class ChunkCost(NamedTuple):
    """Seconds that chunks of prompts add to a step: `fixed_s`, however few tokens they have, and `token_s` for each."""

    fixed_s: float
    token_s: float

    def seconds(self, num_tokens: int) -> float:
        """What chunks of so many tokens together add to a step."""
        return self.fixed_s + num_tokens * self.token_s

    def tokens(self, seconds: float, most: int) -> int:
        """How many of `most` fit; negative if not even the fixed part does."""
        left_s = seconds - self.fixed_s
        if left_s < 0:
            return -1
        return most if left_s >= most * self.token_s else int(left_s / self.token_s)


class StepCost:
    """Seconds of a step that only decodes, by the power of two of how many sequences, and what chunks of prompts add.

    Chunks add a base, so much for each token, for each token of the context before a chunk (all of it is read for even
    one token), and for each pair of the two.
    """

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}
        self._chunks = _Fit()

    def observe(self, num_decodes: int, chunks: Iterable[tuple[int, int]], seconds: float) -> None:
        """One step; `chunks`: the context before each and its tokens. Of no use if its clock stood still."""
        if seconds <= 0:
            return
        decode_s = self.decode_s(num_decodes)
        tokens = context = pairs = 0
        for start, count in chunks:
            tokens, context, pairs = tokens + count, context + start, pairs + start * count
        if not tokens:
            size = num_decodes.bit_length()
            old = self._decode_s.setdefault(size, seconds)
            self._decode_s[size] += (_WEIGHT if seconds > old else _LESS_WEIGHT) * (_clamp(seconds, old) - old)
        elif not num_decodes or decode_s is not None:
            added = max(seconds - (decode_s or 0.0), 0.1 * seconds)
            self._chunks.learn(_features(num_decodes, tokens, context, pairs), added)

    def decode_s(self, num_decodes: int) -> float | None:
        """A step that decodes so many, none: the least met. For a number not met yet that of the nearest one met;
        None until there was any."""
        size = num_decodes.bit_length()
        nearest = min(self._decode_s, key=lambda known: abs(known - size), default=None)
        return None if nearest is None else self._decode_s[nearest]

    def chunks(self, context: int, count: int = 1) -> ChunkCost | None:
        """Of `count` prompts with so many tokens of context together. None until there was a chunk."""
        return self._chunks.of(context, context / max(1, count)) if self._chunks.seen else None

    def token_s(self, context: int) -> float | None:
        """A prompt token, at the rate of a step full of them."""
        cost = self.chunks(context)
        return None if cost is None else cost.token_s


class _Fit:
    """Weights of the features, none negative. Each sample moves them by the least that takes them part of the way to
    it, so that steps that are all alike say nothing about others, and nothing is forgotten for lack of news."""

    def __init__(self) -> None:
        self.seen = False
        self._weights = [0.0] * len(_UNITS)

    def learn(self, features: _Features, seconds: float) -> None:
        guess = sum(w * x for w, x in zip(self._weights, features, strict=True))
        aim = _clamp(seconds, guess) if self.seen else seconds
        gain = (aim - guess) * (_PROMPT_WEIGHT if self.seen else 1.0) / sum(x * x for x in features)
        self._weights = [max(0.0, w + gain * x) for w, x in zip(self._weights, features, strict=True)]
        self.seen = True

    def of(self, context: float, context_of_token: float) -> ChunkCost:
        base, token, ahead, pair = (w / unit for w, unit in zip(self._weights, _UNITS, strict=True))
        return ChunkCost(base + ahead * context, token + pair * context_of_token)


def _features(num_decodes: int, tokens: int, context: int, pairs: int) -> _Features:
    """The base of a step that decodes nothing is not what chunks add."""
    one, token, ahead, pair = _UNITS
    return min(1, num_decodes) / one, tokens / token, context / ahead, pairs / pair


def _clamp(sample: float, estimate: float) -> float:
    return min(max(sample, estimate / _MOST), estimate * _MOST)

"""Which prompts are likely to come while a step runs."""

from __future__ import annotations

from typing import NamedTuple

_LATELY_S = 60.0
_WEIGHT = 0.2  # of the newest


class _Class(NamedTuple):
    last_s: float
    num_tokens: float  # on average


class Awaited:
    """What keeps coming, by class: when the last prompt came, and how many tokens of such prompts must be computed."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}

    def came(self, cls: int, num_tokens: int, now_s: float) -> None:
        old = self._classes.get(cls)
        if old is None:
            self._classes = {own: c for own, c in self._classes.items() if c.last_s >= now_s - _LATELY_S}
            old = _Class(now_s, num_tokens)
        self._classes[cls] = _Class(now_s, old.num_tokens + _WEIGHT * (num_tokens - old.num_tokens))

    def tokens(self, cls: int, now_s: float) -> int | None:
        """Of the prompts of this class or a more important one, whichever has the shortest; None if none came
        lately."""
        lately = (c.num_tokens for own, c in self._classes.items() if own <= cls and c.last_s >= now_s - _LATELY_S)
        tokens = min(lately, default=None)
        return None if tokens is None else int(tokens)

"""Which prompts are likely to arrive while a step runs."""

from __future__ import annotations

from typing import NamedTuple

_RECENT_S = 60.0  # prompts of a class are expected for so long after the last one: the burst of a minute ago may go on
_WEIGHT = 0.2  # of the newest prompt in the average length, so that some ten prompts decide


class _Class(NamedTuple):
    """What has arrived of one class."""

    last_s: float
    num_tokens: float  # on average


class PromptArrivals:
    """By class: when the last prompt arrived, and how many tokens of such prompts must be computed on average."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}

    def observe(self, cls: int, num_tokens: int, now_s: float) -> None:
        """A prompt of class `cls` is admitted, of which `num_tokens` tokens must be computed."""
        old = self._classes.get(cls)
        if old is None:
            self._classes = {own: c for own, c in self._classes.items() if c.last_s >= now_s - _RECENT_S}
            old = _Class(now_s, num_tokens)
        self._classes[cls] = _Class(now_s, old.num_tokens + _WEIGHT * (num_tokens - old.num_tokens))

    def usual_tokens(self, cls: int, now_s: float) -> int | None:
        """The least average length among the classes up to `cls` of which a prompt arrived recently; None if there
        is none."""
        recent = (c.num_tokens for own, c in self._classes.items() if own <= cls and c.last_s >= now_s - _RECENT_S)
        tokens = min(recent, default=None)
        return None if tokens is None else int(tokens)

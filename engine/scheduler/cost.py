"""What a step takes, learnt from the steps themselves."""

from __future__ import annotations

_WEIGHT = 0.2  # of the newest sample
_MOST = 2.0  # one sample moves an estimate as if it were no more than this many times off
_LEAST_TOKENS = 4  # of prompts in a step, so that they always get on
_UNSEEN_S = 0.002  # nobody reading a stream notices so much more in a step


class StepCost:
    """Two numbers that change slowly: seconds of a step that only decodes, by the power of two of how many, and
    seconds that a prompt token adds. (A token costs more late in a long prompt, and more in small chunks than in
    large ones; the estimate follows where the work is.) None until there was such a step."""

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}
        self._added_s: float | None = None  # by a token to a step that also decodes
        self._alone_s: float | None = None  # by a token of a step of prompts alone

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """One step. Of no use if its clock stood still."""
        if seconds <= 0:
            return
        if not num_prompt_tokens:
            size = num_decodes.bit_length()
            self._decode_s[size] = _blend(self._decode_s.get(size), seconds)
        elif not num_decodes:
            self._alone_s = _blend(self._alone_s, seconds / num_prompt_tokens)
        elif (decode_s := self.decode_s(num_decodes)) is not None:
            added = max(seconds - decode_s, 0.1 * seconds)
            self._added_s = _blend(self._added_s, added / num_prompt_tokens)

    def decode_s(self, num_decodes: int) -> float | None:
        """A step that decodes so many. For a number not met yet that of the nearest one met."""
        size = num_decodes.bit_length()
        nearest = min(self._decode_s, key=lambda known: abs(known - size), default=None)
        return None if nearest is None else self._decode_s[nearest]

    @property
    def recompute_s(self) -> float | None:
        """A prompt token, at the rate of a step full of them."""
        return self._added_s if self._alone_s is None else self._alone_s

    def prompt_room(self, num_decodes: int, num_prompts: int, slowdown: float, budget: int) -> int:
        """How many of `budget` tokens prompts may take in a step that also decodes.

        The step may become `slowdown` times what decoding alone takes: of the time, prompts then have the share
        (slowdown - 1) / slowdown. With more prompts than decodes it may become longer in proportion, for more wait
        for a first token than for their next.
        """
        if not num_decodes:
            return budget
        decode_s = self.decode_s(num_decodes)
        token_s = self._alone_s if self._added_s is None else self._added_s
        if decode_s is None or token_s is None:
            return budget
        stretch = slowdown * max(1.0, num_prompts / num_decodes)
        room = max((stretch - 1) * decode_s, _UNSEEN_S) / token_s
        return budget if room >= budget else min(budget, max(int(room), _LEAST_TOKENS))


def _blend(old: float | None, new: float) -> float:
    if old is None:
        return new
    return old + _WEIGHT * (min(max(new, old / _MOST), old * _MOST) - old)

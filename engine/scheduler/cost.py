"""What a step takes, learnt from the steps themselves."""

from __future__ import annotations

_WEIGHT = 0.2  # of the newest sample
_PROMPT_WEIGHT = 0.4  # the same for what prompt tokens take, which grows with their context
_MOST = 2.0  # one sample moves an estimate as if it were no more than this many times off
_LEAST_TOKENS = 4  # of prompts in a step, so that they always get on
_UNSEEN_S = 0.002  # nobody reading a stream notices so much more in a step
_FEW_TOKENS = 16  # fewer in a step cost much more each: all of them read the whole context that is before them
_PAUSED = 1.2  # times as long as slowdown allows: a step that a reader may notice
_RESTED = 22  # steps from one pause to the next, so that 19 of 20 gaps between a stream's tokens are none
_PAUSE_S = 0.25  # at most


class StepCost:
    """Two numbers that change slowly: seconds of a step that only decodes, by the power of two of how many, and
    seconds that a prompt token adds. (A token costs more late in a long prompt, and more in small chunks than in
    large ones; the estimate follows where the work is.) None until there was such a step.

    `slowdown`: how many times as long prompts may make a step as decoding alone is."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._decode_s: dict[int, float] = {}
        self._added_s: float | None = None  # by a token to a step that also decodes
        self._alone_s: float | None = None  # by a token of a step of prompts alone
        self._rested = _RESTED  # steps since the last pause of those that decode, or more than so many

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """One step. Of no use for an estimate if its clock stood still."""
        decode_s = self.decode_s(num_decodes)
        if num_decodes:
            paused = num_prompt_tokens and decode_s and seconds > _PAUSED * self._slowdown * decode_s
            self._rested = 0 if paused else min(self._rested + 1, _RESTED)
        if seconds <= 0:
            return
        if not num_prompt_tokens:
            size = num_decodes.bit_length()
            self._decode_s[size] = _blend(self._decode_s.get(size), seconds, _WEIGHT)
        elif not num_decodes:
            self._alone_s = _blend(self._alone_s, seconds / num_prompt_tokens, _PROMPT_WEIGHT)
        elif decode_s is not None:
            added = max(seconds - decode_s, 0.1 * seconds)
            self._added_s = _blend(self._added_s, added / num_prompt_tokens, _PROMPT_WEIGHT)

    def decode_s(self, num_decodes: int) -> float | None:
        """A step that decodes so many. For a number not met yet that of the nearest one met."""
        size = num_decodes.bit_length()
        nearest = min(self._decode_s, key=lambda known: abs(known - size), default=None)
        return None if nearest is None else self._decode_s[nearest]

    @property
    def recompute_s(self) -> float | None:
        """A prompt token, at the rate of a step full of them."""
        return self._added_s if self._alone_s is None else self._alone_s

    def prompt_room(self, num_decodes: int, crowding: float, wanted: int, budget: int) -> int:
        """How many of `budget` tokens prompts, which lack `wanted`, may take in a step that also decodes.

        The step may become `slowdown` times what decoding alone takes: of the time, prompts then have the share
        (slowdown - 1) / slowdown. With `crowding` above 1 it may become longer in proportion: so much more weighs what
        waits for a first token than what waits for its next.

        Where that is only a few tokens, which are dear, prompts get none until either they would all be done or
        they have the time of many steps to take at once: streams pause now and then instead of being slow always.
        """
        decode_s = self.decode_s(num_decodes)
        token_s = self._alone_s if self._added_s is None else self._added_s
        if decode_s is None or token_s is None:
            return budget
        share_s = max((self._slowdown * max(1.0, crowding) - 1) * decode_s, _UNSEEN_S)
        if share_s < _FEW_TOKENS * token_s and _RESTED * share_s < 2 * _PAUSE_S:
            share_s = min(self._rested * share_s, _PAUSE_S)
            if self._rested < _RESTED and share_s < wanted * token_s:
                return 0
        room = share_s / token_s
        return budget if room >= budget else min(budget, max(int(room), _LEAST_TOKENS))


def _blend(old: float | None, new: float, weight: float) -> float:
    if old is None:
        return new
    return old + weight * (min(max(new, old / _MOST), old * _MOST) - old)

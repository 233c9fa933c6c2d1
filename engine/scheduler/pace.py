"""How much prompt goes into a step beside sequences that decode."""

from __future__ import annotations

from math import inf

from engine.scheduler.cost import ChunkCost, StepCost

_LEAST_TOKENS = 4  # of prompts in a step, so that they always get on
_UNSEEN_S = 0.002  # nobody reading a stream notices so much more in a step
_PAUSED = 1.2  # times as long as slowdown allows: a step that a reader may notice
_RESTED = 22  # steps from one pause to the next, so that 19 of 20 gaps between a stream's tokens are none
_PAUSE_S = 0.25  # at most
_PROBED = 16  # steps with prompts until one decodes alone, so that it stays known what that takes
_UNNOTICED_S = 0.02  # a more important prompt may have to wait so long for less important ones
_WAIT = 0.25  # or so much of the time that it takes itself
_SLOWED = 0.85  # least speed of prompts in pauses, by that in even steps, for streams to pause
_FULL = 8.0  # times as long as decoding alone: a step so long gains little by more prompts in it
_WORTH = 1.2  # and how much higher that speed times the speed of streams must be


class Pace:
    """Each step may become `slowdown` times what decoding alone takes: of the time, prompts then have the share
    (slowdown - 1) / slowdown. That is spent in one of two ways. A chunk has a fixed cost, which grows with its context,
    so that few large ones take less time than many small ones:

    * evenly: a chunk in every step;
    * in pauses: whole chunks in at most one of 20 steps, which takes the time of all of them, and a quarter of a second
      at most; the other steps only decode.

    Streams are even unless the speed of prompts times that of streams is clearly higher in pauses, or a chunk in each
    step takes more than allowed.
    """

    def __init__(self, slowdown: float, cost: StepCost) -> None:
        self._slowdown = slowdown
        self._cost = cost
        self._pausing = False  # if the step in the making turns out long, it is a pause
        self._mixed = 0  # steps since one of those that decode had no prompts
        self._rested = _RESTED  # steps since the last pause of those that decode, or more than so many

    def observe(self, num_decodes: int, with_prompts: bool, seconds: float) -> None:
        """One step, before the cost learns of it."""
        decode_s = self._cost.decode_s(num_decodes)
        if num_decodes:
            long = decode_s is not None and seconds > _PAUSED * self._slowdown * decode_s
            paused = self._pausing and with_prompts and long
            self._rested = 0 if paused else min(self._rested + 1, _RESTED)
            self._mixed = self._mixed + 1 if with_prompts else 0
        self._pausing = False

    def room(
        self, num_decodes: int, chunks: ChunkCost, crowding: float, wanted: int, budget: int, lesser_s: float = 0.0
    ) -> int:
        """How many of `budget` tokens prompts, which lack `wanted`, may take in a step that also decodes. `chunks`:
        what they cost. With `crowding` above 1 a step may become longer in proportion: so much more weighs what waits
        for a first token than what waits for its next. What is lacking need not wait for a pause if it fits into the
        time saved so far. `lesser_s`: what a step takes besides that is not spared, of less important sequences, and
        gives way to these prompts."""
        decode_s = self._cost.decode_s(num_decodes)
        if decode_s is None:
            return budget
        usual_s = decode_s + lesser_s
        share_s = max(self._slowdown * max(1.0, crowding) * usual_s - decode_s, _UNSEEN_S)
        pause_s = min(_RESTED * share_s, _PAUSE_S)
        even, pause = (min(budget, max(_LEAST_TOKENS, chunks.tokens(s, budget))) for s in (share_s, pause_s))
        if even == budget:
            return even
        even_s, pause_s = decode_s + chunks.seconds(even), _RESTED * usual_s + decode_s + chunks.seconds(pause)
        slowed = pause * even_s / (even * pause_s)  # speed of prompts in pauses, by that if even
        spared = (_RESTED + 1) * even_s / pause_s  # the same of streams
        if even == _LEAST_TOKENS:  # perhaps longer than it may be
            slowed *= max(1.0, chunks.seconds(even) / share_s)
        evenly = slowed < _SLOWED or slowed * spared < _WORTH
        rested = self._rested >= _RESTED
        if evenly and not (rested and wanted <= pause):
            probe = self._mixed >= _PROBED and crowding <= 1 and not lesser_s
            return 0 if probe else even
        if rested or chunks.seconds(wanted) <= self._rested * share_s:
            self._pausing = True
            return pause
        return max(0, chunks.tokens(lesser_s, budget))

    def enough(self, num_decodes: int, chunks: ChunkCost, shortest: int, budget: int) -> int:
        """How many of `budget` tokens prompts may take that wait beside others, the shortest for `shortest` tokens. All
        that share a step have their first token when the last one could have it; so a step takes no more of them than
        pay for what a step takes anyway, and the others follow in the next one. In a pause, after which they would have
        to wait for another, and without a limit on slowdown all are taken."""
        decode_s = self._cost.decode_s(num_decodes)
        if decode_s is None or self._pausing or self._slowdown == inf:
            return budget
        return min(budget, max(shortest, chunks.tokens(_FULL * decode_s, budget)))

    def brief(self, chunks: ChunkCost, awaited: int, budget: int) -> int:
        """How many of `budget` tokens less important prompts may take."""
        return min(budget, max(_LEAST_TOKENS, chunks.tokens(self.brief_s(awaited), budget)))

    def brief_s(self, awaited: int) -> float:
        """How long less important prompts may make a step while more important ones, of `awaited` tokens, keep coming.
        Those wait for the end of the step in progress: a part of the time that they take themselves."""
        own = self._cost.chunks(0)
        return _UNNOTICED_S if own is None else max(_UNNOTICED_S, _WAIT * own.seconds(awaited))

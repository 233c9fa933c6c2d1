"""How many tokens of prompts go into a step beside sequences that decode."""

from __future__ import annotations

from math import inf

from engine.scheduler.cost import ChunkCost, StepCost

# What chose these values: `python -m load_tests.engine_bench scheduling` (load_tests/results/scheduling.md): streams
# beside a prompt of 6000 tokens, and two tiers at twice the capacity, on two cores with a model of 135 M parameters.
# Together they meet what that benchmark wants; no mechanism here has a measurement of its own.
_LEAST_TOKENS = 4  # tokens of prompts in a step at least, so that they always get on
_UNSEEN_S = 0.002  # seconds by which any step may become longer: no reader of a stream notices so little
_PAUSED = 1.2  # a step is a pause if it takes so many times what max_decode_slowdown allows: a reader may notice it
_RESTED_STEPS = 22  # steps from one pause to the next, so that the 95th percentile of the time between tokens is none
_PAUSE_S = 0.25  # seconds of a pause at most: the longest stop that still looks like a stream
_PROBE_STEPS = 16  # steps with prompts until one decodes alone, so that it stays known what that takes
_UNNOTICED_S = 0.02  # seconds that a more important prompt may wait for the step of less important ones
_WAIT_SHARE = 0.25  # or this share of its own time, since its TTFT is wanted within 1.5 times that of it alone
_LEAST_PAUSED_SPEED = 0.85  # prompts in pauses must be at least so fast, relative to even steps, for streams to pause
_LEAST_GAIN = 1.2  # and that speed times the streams' must be so many times as high: a smaller gain is not worth gaps
_FULL_STEP = 8.0  # a step so many times as long as decoding alone gains little by more prompts in it


class PrefillThrottle:
    """Holds steps to `slowdown` times what decoding alone takes.

    Of the time, prompts then have the share (slowdown - 1) / slowdown. That is spent in one of two ways, because a
    chunk has a fixed cost, which grows with its context, so that few large ones take less time than many small ones:

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
        self._rested = _RESTED_STEPS  # steps since the last pause of those that decode, or more than so many

    def observe(self, num_decodes: int, with_prompts: bool, seconds: float) -> None:
        """One step that took `seconds`, before the cost learns of it."""
        decode_s = self._cost.decode_s(num_decodes)
        if num_decodes:
            long = decode_s is not None and seconds > _PAUSED * self._slowdown * decode_s
            paused = self._pausing and with_prompts and long
            self._rested = 0 if paused else min(self._rested + 1, _RESTED_STEPS)
            self._mixed = self._mixed + 1 if with_prompts else 0
        self._pausing = False

    def beside_decodes(
        self,
        num_decodes: int,
        chunks: ChunkCost,
        crowding: float,
        wanted: int,
        budget: int,
        less_important_s: float = 0.0,
    ) -> int:
        """How many of `budget` tokens prompts, which lack `wanted` tokens, may take in a step that also decodes.

        `chunks` is what they cost. With `crowding` above 1 a step may become longer in proportion, because more waits
        for a first token than for a next one. What is lacking need not wait for a pause if it fits into the time saved
        so far. `less_important_s`: seconds of a step that less important prompts would take and leave to these.
        """
        decode_s = self._cost.decode_s(num_decodes)
        if decode_s is None:
            return budget
        usual_s = decode_s + less_important_s
        share_s = max(self._slowdown * max(1.0, crowding) * usual_s - decode_s, _UNSEEN_S)
        pause_s = min(_RESTED_STEPS * share_s, _PAUSE_S)
        even, pause = (min(budget, max(_LEAST_TOKENS, chunks.tokens(s, budget))) for s in (share_s, pause_s))
        if even == budget:
            return even
        even_s, pause_s = decode_s + chunks.seconds(even), _RESTED_STEPS * usual_s + decode_s + chunks.seconds(pause)
        slowed = pause * even_s / (even * pause_s)  # speed of prompts in pauses, by that if even
        spared = (_RESTED_STEPS + 1) * even_s / pause_s  # the same of streams
        if even == _LEAST_TOKENS:  # perhaps longer than it may be
            slowed *= max(1.0, chunks.seconds(even) / share_s)
        evenly = slowed < _LEAST_PAUSED_SPEED or slowed * spared < _LEAST_GAIN
        rested = self._rested >= _RESTED_STEPS
        if evenly and not (rested and wanted <= pause):
            probe = self._mixed >= _PROBE_STEPS and crowding <= 1 and not less_important_s
            return 0 if probe else even
        if rested or chunks.seconds(wanted) <= self._rested * share_s:
            self._pausing = True
            return pause
        return max(0, chunks.tokens(less_important_s, budget))

    def one_after_another(self, num_decodes: int, chunks: ChunkCost, shortest: int, budget: int) -> int:
        """How many of `budget` tokens several prompts may take, of which the shortest lacks `shortest` tokens.

        All that share a step have their first token when the last one could have it. So a step takes no more of them
        than make it long enough for its fixed cost not to matter, and the others follow in the next one. All are taken
        in a pause, after which they would have to wait for another, and without a limit on slowdown.
        """
        decode_s = self._cost.decode_s(num_decodes)
        if decode_s is None or self._pausing or self._slowdown == inf:
            return budget
        return min(budget, max(shortest, chunks.tokens(_FULL_STEP * decode_s, budget)))

    def beside_more_important(self, chunks: ChunkCost, usual_tokens: int, budget: int) -> int:
        """How many of `budget` tokens prompts may take while more important ones of `usual_tokens` keep arriving."""
        return min(budget, max(_LEAST_TOKENS, chunks.tokens(self.unnoticed_s(usual_tokens), budget)))

    def unnoticed_s(self, usual_tokens: int) -> float:
        """Seconds that prompts may take in a step while more important ones of `usual_tokens` keep arriving.

        Those wait for the end of the step in progress: for a part of the time that they take themselves.
        """
        own = self._cost.chunks(0)
        return _UNNOTICED_S if own is None else max(_UNNOTICED_S, _WAIT_SHARE * own.seconds(usual_tokens))

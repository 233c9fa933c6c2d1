"""From a phase of a scenario to the requests it sends. Pure, and the same for the same seed.

Times, lengths and prefix groups draw from generators of their own, so that changing one leaves the others as they
were.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from autoscaling.traces.formats import Row, TraceError, read_trace
from load_tests.arrivals import Closed, Ramp, RecordedArrivals
from load_tests.errors import LoadError
from load_tests.lengths import RecordedLength
from load_tests.prompts import Segment
from load_tests.scenario import Phase


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `segments` are what it adds to the conversation; `pause_s`: from the last answer until it is
    due."""

    segments: tuple[Segment, ...]
    output_tokens: int
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """One arrival. `at_s`: seconds from the phase's start; None in a closed loop."""

    at_s: float | None
    turns: tuple[Turn, ...]


def rows_of(phase: Phase) -> tuple[Row, ...]:
    """The phase's trace, cut and scaled in time; () without one. Raises LoadError."""
    trace = phase.trace
    if trace is None:
        return ()
    try:
        kept = [row for row in read_trace(trace.file) if row.at_s >= trace.start_s]
    except TraceError as error:
        raise LoadError(str(error)) from None
    if not kept:
        raise LoadError(f"{trace.file}: nothing at or after start_s {trace.start_s:g}")
    return tuple(replace(row, at_s=(row.at_s - trace.start_s) * trace.time_scale) for row in kept)


def jobs(phase: Phase, seed: int, rows: Sequence[Row] = ()) -> Iterator[Job]:
    """A closed loop without `requests` has no end. Lengths from a trace begin anew when it is used up."""
    where = f"{seed}/{phase.name}"
    lengths, groups, pauses = (random.Random(f"{where}/{part}") for part in ("lengths", "groups", "pauses"))
    for i, at_s in enumerate(_times(phase, random.Random(f"{where}/arrivals"), rows)):
        if i == phase.requests or (at_s is not None and phase.duration_s is not None and at_s >= phase.duration_s):
            return
        row = rows[i % len(rows)] if rows else None
        head = _prefix(phase, groups)
        turns = []
        num_turns = phase.conversations.turns.draw(lengths, None) if phase.conversations else 1
        for t in range(num_turns):
            prompt_tokens = phase.prompt.draw(lengths, row.prompt_tokens if row else None)
            output_tokens = phase.output.draw(lengths, row.output_tokens if row else None)
            pause_s = 0.0
            if t and phase.conversations and phase.conversations.think_s:
                pause_s = pauses.expovariate(1 / phase.conversations.think_s)
            own = _blocks(phase, row, prompt_tokens) or (Segment(f"{phase.name}/{i}/{t}", prompt_tokens),)
            turns.append(Turn((*head, *own), output_tokens, pause_s))
            head = ()
        yield Job(at_s, tuple(turns))


def _times(phase: Phase, rng: random.Random, rows: Sequence[Row]) -> Iterator[float | None]:
    arrivals = phase.arrivals
    if isinstance(arrivals, Closed):
        return repeat(None)
    if isinstance(arrivals, RecordedArrivals):
        return arrivals.times([row.at_s for row in rows])
    if isinstance(arrivals, Ramp):
        assert phase.duration_s is not None  # the phase checks it
        return arrivals.times(rng, phase.duration_s)
    return arrivals.times(rng) if arrivals.kind == "poisson" else arrivals.times()


def _prefix(phase: Phase, rng: random.Random) -> tuple[Segment, ...]:
    if phase.prefixes is None:
        return ()
    group = rng.randrange(phase.prefixes.groups)
    return (Segment(f"{phase.name}/prefix/{group}", phase.prefixes.tokens, shared=True),)


def _blocks(phase: Phase, row: Row | None, prompt_tokens: int) -> tuple[Segment, ...]:
    """The recorded prefix blocks, their size scaled with the prompts'; together `prompt_tokens`. Blocks are named by
    the file, so that phases that play the same trace share them."""
    if row is None or not row.blocks or phase.trace is None or not isinstance(phase.prompt, RecordedLength):
        return ()
    size = max(1, round(row.block_tokens * phase.prompt.scale))
    segments, left = [], prompt_tokens
    for i, block in enumerate(row.blocks):
        if left <= 0:
            break
        last = i == len(row.blocks) - 1
        tokens = left if last else min(size, left)
        segments.append(Segment(f"{phase.trace.file.name}/{block}", tokens, shared=True))
        left -= tokens
    return tuple(segments)

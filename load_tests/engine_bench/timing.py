"""How long something takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

WARM_UP = 2
Clock = Callable[[], float]


def samples(
    run: Callable[[], object], budget_s: float, least: int = 3, most: int = 1000, clock: Clock = time.perf_counter
) -> list[float]:
    """Seconds of each run, as many as fit budget_s, `least` to `most`; at most WARM_UP runs before them are not
    counted, one if it is longer than the budget."""
    spent = 0.0
    for _ in range(WARM_UP):
        if spent < budget_s:
            spent += _once(run, clock)
    taken = [_once(run, clock) for _ in range(least)]
    while sum(taken) < budget_s and len(taken) < most:
        taken.append(_once(run, clock))
    return taken


def seconds(
    run: Callable[[], object], budget_s: float, least: int = 3, most: int = 1000, clock: Clock = time.perf_counter
) -> float:
    """The median of samples()."""
    return median(samples(run, budget_s, least, most, clock))


def _once(run: Callable[[], object], clock: Clock) -> float:
    start = clock()
    run()
    return clock() - start

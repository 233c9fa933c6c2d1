"""Ray Serve's own rule, with its own delays and defaults (2.60): the baseline that the others have to beat."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Self

from autoscaling.base import Proposal, Signals
from autoscaling.settings import Settings, setting

_EPSILON_S = 1e-6


@dataclass(frozen=True, slots=True)
class OngoingParams(Settings):
    """Ray Serve's settings by their names, with its defaults. `downscale_to_zero_delay_s` None: downscale_delay_s."""

    target_ongoing_requests: float = setting(2.0, above=0)
    look_back_period_s: float = setting(30.0, above=0)
    upscale_delay_s: float = setting(30.0, 0)
    downscale_delay_s: float = setting(600.0, 0)
    downscale_to_zero_delay_s: float | None = setting(None, 0)
    upscaling_factor: float = setting(1.0, above=0)
    downscaling_factor: float = setting(1.0, above=0)


class OngoingRequests:
    """The mean of ongoing requests over the look-back period, over the target for one replica. A wish must last for its
    delay before it becomes the answer; one moment of another wish begins the delay anew."""

    Params: ClassVar[type[Settings]] = OngoingParams
    raw: ClassVar[bool] = True

    def __init__(self, params: OngoingParams) -> None:
        self._params = params
        self._seen: deque[tuple[float, float]] = deque()
        self._direction = 0
        self._since_s: float | None = None

    @classmethod
    def build(cls, params: OngoingParams) -> Self:
        """A policy without a past."""
        return cls(params)

    def decide(self, signals: Signals, now_s: float) -> Proposal:
        """As Ray Serve would decide at `now_s`, in whole replicas."""
        p, current, target = self._params, signals.serving, signals.target
        if signals.ongoing is None:
            return Proposal(target, "unknown", hold=True)
        requests = self._mean(signals.ongoing, now_s)
        terms = {"ongoing": requests}
        if current == 0:
            if signals.ongoing > 0:
                return Proposal(max(math.ceil(p.upscaling_factor), target), "cold start", terms)
            return Proposal(target, "as it is", terms)
        ratio = requests / (p.target_ongoing_requests * current)
        wanted = self._scaled(current * ratio, current)  # in this order it rounds as Ray does
        return Proposal(self._delayed(max(0, wanted), target, now_s), "ongoing requests", {**terms, "wanted": wanted})

    def _mean(self, ongoing: float, now_s: float) -> float:
        """Time-weighted: each value holds until the next."""
        start_s = now_s - self._params.look_back_period_s
        seen = self._seen
        seen.append((now_s, ongoing))
        while len(seen) > 1 and seen[1][0] <= start_s:
            seen.popleft()
        area = length = 0.0
        for (at_s, value), (next_s, _) in pairwise(seen):
            width = next_s - max(at_s, start_s)
            area += value * width
            length += width
        return area / length if length > 0 else ongoing

    def _scaled(self, wanted: float, current: int) -> int:
        p = self._params
        factor = p.upscaling_factor if wanted > current else p.downscaling_factor
        scaled = math.ceil(current + factor * (wanted - current))
        if math.ceil(wanted) < current and scaled == current:
            scaled -= 1  # the factor must not hold it up
        return scaled

    def _delayed(self, wanted: int, target: int, now_s: float) -> int:
        p = self._params
        direction = (wanted > target) - (wanted < target)
        if direction == 0:
            self._direction, self._since_s = 0, None
            return target
        delay_s = p.upscale_delay_s
        if direction < 0:
            to_zero = target == 1
            delay_s = p.downscale_delay_s
            if to_zero and p.downscale_to_zero_delay_s is not None:
                delay_s = p.downscale_to_zero_delay_s
            wanted = wanted if to_zero else max(1, wanted)
        if direction != self._direction or self._since_s is None:
            self._direction, self._since_s = direction, now_s
        if now_s - self._since_s + _EPSILON_S < delay_s:
            return target
        self._direction, self._since_s = 0, None
        return wanted

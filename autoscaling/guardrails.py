"""Between a policy's wish and the target: bounds, speed limits, damping, panic, and care with zero. Pure but for its
own state; time is an argument."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from autoscaling.base import Proposal, Signals
from autoscaling.settings import PolicyError, Settings, setting

_TRIFLE = 0.05  # of a replica: less is noise, and is not worth a start


@dataclass(frozen=True, slots=True)
class GuardrailParams(Settings):
    """`hysteresis`: in replicas; a wish must be so much below a whole number to scale down to it.
    `downscale_window_s`: the target never falls below the highest wish of so long. `upscale_cooldown_s` and
    `downscale_cooldown_s`: least time between two such changes. `max_up_factor`, `max_up_step`: one change at most
    multiplies the target by the one or adds the other, whichever is more. `max_down_share`: of the target that one
    change may take away, at least one replica.
    `flap_limit`: so many changes of direction within `flap_window_s` double the downscale window, each further one
    again, up to eight times. `panic_backlog_s`: with so much backlog for each serving replica, nothing slows an
    upscale and nothing scales down for `panic_s`. `idle_to_zero_s`: with min_replicas 0, the last replica goes when
    nothing at all was asked for so long. `protect_start_s`: a pool that came up from zero is not sent back before
    this much time after its first replica serves. A controller that has just started does not scale down before it has
    seen a whole window."""

    min_replicas: int = setting(1, 0)
    max_replicas: int = setting(8, 1)
    hysteresis: float = setting(0.25, 0)
    downscale_window_s: float = setting(600.0, 0)
    upscale_cooldown_s: float = setting(0.0, 0)
    downscale_cooldown_s: float = setting(15.0, 0)
    max_up_factor: float = setting(4.0, 1)
    max_up_step: int = setting(4, 1)
    max_down_share: float = setting(0.34, 0.0, 1.0)
    flap_limit: int = setting(6, 2)
    flap_window_s: float = setting(1200.0, 0)
    panic_backlog_s: float = setting(5.0, above=0)
    panic_s: float = setting(60.0, 0)
    idle_to_zero_s: float = setting(300.0, 0)
    protect_start_s: float = setting(60.0, 0)

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.min_replicas > self.max_replicas:
            raise PolicyError(
                f"min_replicas: must be at most max_replicas {self.max_replicas}, got {self.min_replicas}"
            )


@dataclass(frozen=True, slots=True)
class Guarded:
    """The number that passed, and which guardrails changed it."""

    target: int
    limits: tuple[str, ...]


class Guardrails:
    """One pool's. `apply` must be told every decision in turn, also those that change nothing."""

    def __init__(self, params: GuardrailParams, *, bounds_only: bool = False) -> None:
        self.params = params
        self._bounds_only = bounds_only
        self._wishes: deque[tuple[float, int]] = deque()  # falling: the first is the highest in the window
        self._turns: deque[float] = deque()
        self._direction = 0
        self._last_up_s = -math.inf
        self._last_down_s = -math.inf
        self._panic_until_s = -math.inf
        self._started_s: float | None = None
        self._active_s = -math.inf
        self._serving_since_s: float | None = None

    def apply(self, proposal: Proposal, signals: Signals, now_s: float) -> Guarded:
        """`proposal.replicas` must be finite. Holds are taken as the target as it stands, within bounds."""
        current = signals.target
        self._observe(signals, now_s)
        limits: list[str] = []
        wish = current if proposal.hold else self._whole(proposal.replicas, current)
        target = wish
        if not self._bounds_only:
            target = self._remember(wish, now_s)
            if target > wish and wish < current:
                limits.append("downscale_window")
            if target > current:
                target = self._up(target, current, now_s, limits)
            elif target < current:
                target = self._down(target, signals, now_s, limits)
        bounded = self._bound(target, current, now_s)
        if bounded != target:
            limits.append("min_replicas" if bounded > target else "max_replicas")
        if bounded == 0 and current > 0 and not self._may_be_zero(signals, now_s):
            bounded = 1
            limits.append("idle_to_zero")
        if bounded == 0 and signals.queued > 0:
            bounded = 1
            limits.append("cold_start")
        self._note_change(bounded, current, now_s)
        return Guarded(bounded, tuple(limits))

    def _whole(self, replicas: float, current: int) -> int:
        """A trifle is no replica, and so little less than one does not pay for the change. A whole number is meant."""
        if self._bounds_only or float(replicas).is_integer():
            return math.ceil(max(0.0, replicas))
        if replicas <= _TRIFLE:
            return 0
        wish = math.ceil(replicas - _TRIFLE)
        return wish if wish >= current else min(current, math.ceil(replicas + self.params.hysteresis))

    def _observe(self, signals: Signals, now_s: float) -> None:
        if self._started_s is None:
            self._started_s = self._active_s = now_s
        ongoing = signals.ongoing
        if ongoing is None or ongoing > 0 or signals.arrival_rate or signals.starting:  # unknown is not idle
            self._active_s = now_s
        if signals.serving == 0:
            self._serving_since_s = None
        elif self._serving_since_s is None:
            self._serving_since_s = now_s
        backlog = signals.backlog_s
        if backlog is not None and signals.serving and backlog / signals.serving >= self.params.panic_backlog_s:
            self._panic_until_s = now_s + self.params.panic_s

    def _remember(self, wish: int, now_s: float) -> int:
        """The highest wish of the downscale window; of nothing more once the pool has been idle for long enough."""
        if self.params.min_replicas == 0 and now_s - self._active_s >= self.params.idle_to_zero_s:
            self._wishes.clear()
        while self._wishes and self._wishes[-1][1] <= wish:
            self._wishes.pop()
        self._wishes.append((now_s, wish))
        while self._turns and self._turns[0] < now_s - self.params.flap_window_s:
            self._turns.popleft()
        over = len(self._turns) - self.params.flap_limit
        window = self.params.downscale_window_s * 2.0 ** min(3, max(0, over + 1))
        while self._wishes[0][0] < now_s - window:
            self._wishes.popleft()
        return self._wishes[0][1]

    def _up(self, target: int, current: int, now_s: float, limits: list[str]) -> int:
        p = self.params
        if now_s < self._panic_until_s:
            return target
        if now_s - self._last_up_s < p.upscale_cooldown_s:
            limits.append("upscale_cooldown")
            return current
        most = max(current + p.max_up_step, math.floor(current * p.max_up_factor))
        if target > most:
            limits.append("max_up")
        return min(target, most)

    def _down(self, target: int, signals: Signals, now_s: float, limits: list[str]) -> int:
        p, current = self.params, signals.target
        assert self._started_s is not None
        held = (
            "warmup" if now_s - self._started_s < p.downscale_window_s
            else "panic" if now_s < self._panic_until_s
            else "downscale_cooldown" if now_s - max(self._last_down_s, self._last_up_s) < p.downscale_cooldown_s
            else "unknown" if signals.serving and not signals.reporting
            else None
        )  # fmt: skip
        if held:
            limits.append(held)
            return current
        least = current - max(1, math.floor(current * p.max_down_share))
        if target < least:
            limits.append("max_down")
        return max(target, least)

    def _bound(self, target: int, current: int, now_s: float) -> int:
        return max(self.params.min_replicas, min(self.params.max_replicas, target))

    def _may_be_zero(self, signals: Signals, now_s: float) -> bool:
        p = self.params
        if signals.starting or self._serving_since_s is None:  # what is starting was asked for
            return False
        return now_s - self._active_s >= p.idle_to_zero_s and now_s - self._serving_since_s >= p.protect_start_s

    def _note_change(self, target: int, current: int, now_s: float) -> None:
        direction = (target > current) - (target < current)
        if direction > 0:
            self._last_up_s = now_s
        elif direction < 0:
            self._last_down_s = now_s
        if direction and direction == -self._direction:
            self._turns.append(now_s)
        self._direction = direction or self._direction

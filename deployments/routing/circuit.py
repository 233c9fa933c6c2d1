"""A circuit breaker: stops asking a destination that fails, and probes it with single requests until it works again.

Pure: the clock is an argument. All of a gateway's breakers live on its event loop, so nothing here is locked.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class CircuitConfig:
    """When a circuit opens and closes; names that end in `_s` are seconds.

    It opens after `failures` in a row, or when of at least `min_calls` in the last `window_s` the share `failure_rate`
    failed. It then allows no call for `cooldown_s`, which doubles with each failed probe up to `max_cooldown_s`. A
    probe whose outcome is not reported within `probe_s` is forgotten.
    """

    failures: int = 3
    failure_rate: float = 0.5
    min_calls: int = 20
    window_s: float = 30.0
    cooldown_s: float = 1.0
    max_cooldown_s: float = 30.0
    probe_s: float = 60.0


class State(StrEnum):
    """Which calls a circuit allows."""

    CLOSED = "closed"  # all
    OPEN = "open"  # none
    HALF_OPEN = "half_open"  # one, as a probe


class Circuit:
    """The circuit breaker of one destination.

    A caller asks allow() first. If that is true, it reports the outcome exactly once: success(), failure(), or
    neither() when the outcome says nothing about the destination (a client's mistake, a client that left).
    """

    def __init__(self, config: CircuitConfig | None = None) -> None:
        self._config = config or CircuitConfig()
        self._in_a_row = 0
        self._calls: deque[tuple[float, bool]] = deque()  # (when, failed) of the window
        self._failed = 0  # of those
        self._open_until_s: float | None = None
        self._cooldown_s = self._config.cooldown_s
        self._probe_since_s: float | None = None

    def state(self, now_s: float) -> State:
        """The state at `now_s`."""
        if self._open_until_s is None:
            return State.CLOSED
        return State.OPEN if now_s < self._open_until_s else State.HALF_OPEN

    def retry_after_s(self, now_s: float) -> float:
        """Seconds until the next call may be allowed."""
        return max(0.0, (self._open_until_s or now_s) - now_s)

    def would_allow(self, now_s: float) -> bool:
        """What allow() would return, without beginning a probe."""
        match self.state(now_s):
            case State.CLOSED:
                return True
            case State.OPEN:
                return False
        return self._probe_since_s is None or now_s - self._probe_since_s >= self._config.probe_s

    def allow(self, now_s: float) -> bool:
        """Whether a call may be made now. In the half-open state the first to ask makes the probe."""
        allowed = self.would_allow(now_s)
        if allowed and self._open_until_s is not None:
            self._probe_since_s = now_s
        return allowed

    def success(self, now_s: float) -> None:
        """Reports that a call went well."""
        if self._open_until_s is None:
            self._in_a_row = 0
            self._note(now_s, failed=False)
        elif self.state(now_s) is State.HALF_OPEN:
            self._close()

    def failure(self, now_s: float) -> None:
        """Reports that a call failed."""
        if self._open_until_s is None:
            self._in_a_row += 1
            self._note(now_s, failed=True)
            calls, limit = len(self._calls), self._config
            often = calls >= limit.min_calls and self._failed >= limit.failure_rate * calls
            if self._in_a_row >= limit.failures or often:
                self._open(now_s)
        elif self.state(now_s) is State.HALF_OPEN:
            self._cooldown_s = min(2 * self._cooldown_s, self._config.max_cooldown_s)
            self._open(now_s)

    def neither(self, now_s: float) -> None:
        """Reports that a call has ended with an outcome that does not count."""
        self._probe_since_s = None

    def _open(self, now_s: float) -> None:
        self._open_until_s = now_s + self._cooldown_s
        self._probe_since_s = None

    def _close(self) -> None:
        self._open_until_s = self._probe_since_s = None
        self._cooldown_s = self._config.cooldown_s
        self._in_a_row = self._failed = 0
        self._calls.clear()

    def _note(self, now_s: float, failed: bool) -> None:
        self._calls.append((now_s, failed))
        self._failed += failed
        while self._calls and self._calls[0][0] < now_s - self._config.window_s:
            self._failed -= self._calls.popleft()[1]

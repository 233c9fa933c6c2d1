"""How many retries a gateway may add to what clients send: a storm of failures must not become a storm of requests.

Pure: the clock is an argument.
"""

from __future__ import annotations

_RATIO = 0.2  # retries per request, in the long run
_PER_S = 2.0  # and so many more, for a gateway with little to do
_MOST = 50.0  # saved up


class RetryBudget:
    """Each request pays in; each attempt elsewhere after a failure, and each hedge, takes out. What a replica's loss
    makes to be asked again is not meant: that is bounded by what ran there."""

    def __init__(self, ratio: float = _RATIO, per_s: float = _PER_S, most: float = _MOST) -> None:
        self._ratio = ratio
        self._per_s = per_s
        self._most = most
        self._saved = most
        self._seen_s: float | None = None

    def request(self, now_s: float) -> None:
        """A request has come."""
        self._accrue(now_s)
        self._saved = min(self._most, self._saved + self._ratio)

    def take(self, now_s: float) -> bool:
        """Whether one more attempt may be made for a request that has had one."""
        self._accrue(now_s)
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True

    def _accrue(self, now_s: float) -> None:
        if self._seen_s is not None:
            self._saved = min(self._most, self._saved + self._per_s * max(0.0, now_s - self._seen_s))
        self._seen_s = now_s

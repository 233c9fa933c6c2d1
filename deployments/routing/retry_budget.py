"""Bounds how many retries a gateway adds to what clients send, so that many failures do not multiply the load.

Pure: the clock is an argument.
"""

from __future__ import annotations

_RATIO = 0.2  # retries per request, in the long run
_PER_S = 2.0  # retries per second beside that, for a gateway with few requests
_MOST = 50.0  # retries that can be saved up


class RetryBudget:
    """Each request adds `ratio` of a retry and each second `per_s`, up to `most`; each retry and each hedge takes one.

    Going on with the answers of a lost replica takes none: that is bounded by what ran there.
    """

    def __init__(self, ratio: float = _RATIO, per_s: float = _PER_S, most: float = _MOST) -> None:
        self._ratio = ratio
        self._per_s = per_s
        self._most = most
        self._saved = most
        self._seen_s: float | None = None

    def request(self, now_s: float) -> None:
        """Counts a request of a client."""
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

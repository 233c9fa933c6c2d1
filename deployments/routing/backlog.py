"""How long a pool's queue is, in seconds of its own work, and who may still join it.

Pure: the clock is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_SMOOTH_S = 5.0  # over which a rate is averaged


class ServiceRate:
    """Sequences' tokens, prompt and answer alike, that a replica gets done per second while requests wait: then it does
    what it can. None until that has been seen."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        self._last: tuple[float, int, bool] | None = None

    def observe(self, now_s: float, done_tokens: int, waiting: bool) -> None:
        """`done_tokens`: since the replica started; a smaller number than before is another replica's."""
        last, self._last = self._last, (now_s, done_tokens, waiting)
        if last is None or not (last[2] and waiting) or done_tokens < last[1] or now_s <= last[0]:
            return
        span = now_s - last[0]
        rate = (done_tokens - last[1]) / span
        weight = 1.0 - math.exp(-span / _SMOOTH_S)
        self.tokens_per_s = rate if self.tokens_per_s is None else (1 - weight) * self.tokens_per_s + weight * rate


@dataclass(frozen=True, slots=True)
class ReplicaBacklog:
    """One replica's queue: prompt tokens to compute, requests without a seat, and its rate, where known."""

    pending_tokens: int
    waiting: int
    tokens_per_s: float | None


def backlog_s(replicas: Iterable[ReplicaBacklog], answer_tokens: float) -> float:
    """Until a request that comes now would be begun, on the replica where that is soonest. `answer_tokens`: what a
    request of this pool generates on average. A replica of unknown rate has not had a queue yet: 0."""
    shortest: float | None = None
    for replica in replicas:
        seconds = _seconds(replica, answer_tokens)
        if not seconds:
            return 0.0  # most often the first: the others need not be looked at
        shortest = seconds if shortest is None else min(shortest, seconds)
    return shortest or 0.0


def retry_after_s(queue_s: float, max_queue_s: float, share: float) -> float | None:
    """None: a request that may use `share` of the queue may join it. Else the time until the queue will have become
    short enough for it, if nobody else comes."""
    excess = queue_s - max_queue_s * share
    return excess if excess > 0 else None


def _seconds(replica: ReplicaBacklog, answer_tokens: float) -> float:
    if not replica.waiting or not replica.tokens_per_s:
        return 0.0
    return (replica.pending_tokens + replica.waiting * answer_tokens) / replica.tokens_per_s

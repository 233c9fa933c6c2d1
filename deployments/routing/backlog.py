"""Estimates how many seconds of work a pool's queue holds, and decides which requests may still join it.

Pure: the clock is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_SMOOTH_S = 5.0  # seconds, time constant of the rate's moving average


class ServiceRate:
    """How many tokens, of prompts and answers, a replica computes per second while requests wait: its full speed.

    `tokens_per_s` is None until requests have been seen to wait.
    """

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        self._last: tuple[float, int, bool] | None = None

    def observe(self, now_s: float, done_tokens: int, waiting: bool) -> None:
        """Takes a count at `now_s`. `done_tokens`: since the replica started; a smaller count is another replica's."""
        last, self._last = self._last, (now_s, done_tokens, waiting)
        if last is None or not (last[2] and waiting) or done_tokens < last[1] or now_s <= last[0]:
            return
        span = now_s - last[0]
        rate = (done_tokens - last[1]) / span
        weight = 1.0 - math.exp(-span / _SMOOTH_S)
        self.tokens_per_s = rate if self.tokens_per_s is None else (1 - weight) * self.tokens_per_s + weight * rate


@dataclass(frozen=True, slots=True)
class ReplicaBacklog:
    """One replica's queue: prompt tokens to compute, requests that wait, and tokens per second where known."""

    pending_tokens: int
    waiting: int
    tokens_per_s: float | None


def backlog_s(replicas: Iterable[ReplicaBacklog], answer_tokens: float) -> float:
    """How many seconds a request that comes now would wait, on the replica where that is shortest.

    `answer_tokens`: how many tokens a request of this pool generates on average. A replica whose rate is not known has
    had no queue yet, and counts as 0 seconds.
    """
    shortest: float | None = None
    for replica in replicas:
        seconds = _seconds(replica, answer_tokens)
        if not seconds:
            return 0.0  # most often the first: the others need not be looked at
        shortest = seconds if shortest is None else min(shortest, seconds)
    return shortest or 0.0


def retry_after_s(queue_s: float, max_queue_s: float, share: float) -> float | None:
    """None when a request that may use `share` of the queue may join it now.

    Otherwise the seconds until the queue will be short enough for it, if no other request comes.
    """
    excess = queue_s - max_queue_s * share
    return excess if excess > 0 else None


def _seconds(replica: ReplicaBacklog, answer_tokens: float) -> float:
    if not replica.waiting or not replica.tokens_per_s:
        return 0.0
    return (replica.pending_tokens + replica.waiting * answer_tokens) / replica.tokens_per_s

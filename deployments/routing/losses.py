"""Counts the replicas that one request has been lost with: it may be what kills them."""

from __future__ import annotations

from deployments.channel.errors import StreamReturnedError
from deployments.routing.errors import RepeatedLossError
from deployments.routing.failures import RESUMABLE

MOST = 2  # replicas; one alone is more often lost for another reason
PROGRESS = 64  # tokens on one replica, after which the losses before it were not the request's doing


class ReplicaLosses:
    """Of one request."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, error: Exception, tokens: int = 0) -> None:
        """Counts a replica that had the request, and failed with `error` after `tokens` tokens of the answer.

        Raises RepeatedLossError when the request is not to be given to another one.
        """
        if isinstance(error, StreamReturnedError) or not isinstance(error, RESUMABLE):
            return
        self._count = 1 if tokens >= PROGRESS else self._count + 1
        if self._count >= MOST:
            raise RepeatedLossError(self._count)

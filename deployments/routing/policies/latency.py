"""Chooses the replica whose first tokens have come soonest of late."""

from __future__ import annotations

import random
from collections.abc import Sequence

from deployments.routing.policies.base import ReplicaView, RouteHint
from deployments.routing.policies.work import lowest, requests

_EXPLORE = 0.05  # share of random choices: otherwise a replica that was slow once would never be chosen again


class Latency:
    """For replicas that differ in ways that their load does not show: other hardware, a busy machine.

    The average TTFT is multiplied with the number of open requests, since the average lags behind. A replica that has
    not been tried yet comes first.
    """

    wants_prefixes = False

    def choose(self, candidates: Sequence[ReplicaView], request: RouteHint, rng: random.Random) -> int:
        """See Policy."""
        if rng.random() < _EXPLORE:
            return rng.randrange(len(candidates))
        return lowest([(view.ttft_s or 0.0) * (1 + requests(view)) for view in candidates], rng)

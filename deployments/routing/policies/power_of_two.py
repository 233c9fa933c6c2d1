"""Draws two replicas at random and chooses the one with less work."""

from __future__ import annotations

import random
from collections.abc import Sequence

from deployments.routing.policies.base import ReplicaView, RouteHint
from deployments.routing.policies.work import work


class PowerOfTwo:
    """For many gateways that hear of each other's choices late: they do not all run to the same least loaded replica
    (Mitzenmacher, "The power of two choices in randomized load balancing", 2001)."""

    wants_prefixes = False

    def choose(self, candidates: Sequence[ReplicaView], request: RouteHint, rng: random.Random) -> int:
        """See Policy."""
        if len(candidates) == 1:
            return 0
        a, b = rng.sample(range(len(candidates)), 2)
        return a if work(candidates[a]) <= work(candidates[b]) else b

"""Chooses the replicas in turn, whatever they have to do."""

from __future__ import annotations

import random
from collections.abc import Sequence

from deployments.routing.policies.base import ReplicaView, RouteHint


class RoundRobin:
    """Chooses the one that was chosen longest ago, so that the order survives replicas that come and go."""

    wants_prefixes = False

    def choose(self, candidates: Sequence[ReplicaView], request: RouteHint, rng: random.Random) -> int:
        """See Policy."""
        return min(range(len(candidates)), key=lambda i: candidates[i].last_chosen)

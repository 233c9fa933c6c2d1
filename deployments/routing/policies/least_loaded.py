"""Chooses the replica with the least work."""

from __future__ import annotations

import random
from collections.abc import Sequence

from deployments.routing.policies.base import ReplicaView, RouteHint
from deployments.routing.policies.work import lowest, work


class LeastLoaded:
    """For requests that have nothing in common with one another."""

    wants_prefixes = False

    def choose(self, candidates: Sequence[ReplicaView], request: RouteHint, rng: random.Random) -> int:
        """See Policy."""
        return lowest([work(view) for view in candidates], rng)

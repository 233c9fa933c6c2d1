"""The one with the least work waiting."""

from __future__ import annotations

import random
from collections.abc import Sequence

from deployments.routing.policies.base import ReplicaView, RouteHint
from deployments.routing.policies.work import lowest, work


class LeastLoaded:
    """Knows nothing of the request: the choice for requests that have nothing in common with one another."""

    wants_prefixes = False

    def choose(self, candidates: Sequence[ReplicaView], request: RouteHint, rng: random.Random) -> int:
        return lowest([work(view) for view in candidates], rng)

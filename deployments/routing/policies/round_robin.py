"""Each in its turn, whatever it has to do."""

from __future__ import annotations

import random
from collections.abc import Sequence

from deployments.routing.policies.base import ReplicaView, RouteHint


class RoundRobin:
    """The one that was chosen longest ago: a turn that survives replicas coming and going."""

    wants_prefixes = False

    def choose(self, candidates: Sequence[ReplicaView], request: RouteHint, rng: random.Random) -> int:
        return min(range(len(candidates)), key=lambda i: candidates[i].last_chosen)

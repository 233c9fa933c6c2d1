"""The one whose first tokens have come soonest of late."""

from __future__ import annotations

import random
from collections.abc import Sequence

from deployments.routing.policies.base import ReplicaView, RouteHint
from deployments.routing.policies.work import lowest, requests

_EXPLORE = 0.05  # of the choices: a replica that was slow once would never be asked again


class Latency:
    """For replicas that differ in ways their load does not tell: other hardware, a neighbour on the machine. The time
    to the first token is weighed with the requests open, for it lags behind them. A replica not tried yet goes first.
    """

    wants_prefixes = False

    def choose(self, candidates: Sequence[ReplicaView], request: RouteHint, rng: random.Random) -> int:
        if rng.random() < _EXPLORE:
            return rng.randrange(len(candidates))
        return lowest([(view.ttft_s or 0.0) * (1 + requests(view)) for view in candidates], rng)

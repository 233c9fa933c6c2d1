"""Chooses the replica that has the least to compute before the first token, given what each has cached."""

from __future__ import annotations

import random
from collections.abc import Sequence

from deployments.routing.policies.base import ReplicaView, RouteHint
from deployments.routing.policies.work import lowest, work


class PrefixAffinity:
    """A replica's cost is its work and the part of the prompt that it has not cached, both in prompt tokens.

    So affinity is worth exactly the prefill that it saves: a replica with the prefix is preferred until its queue is
    longer by as much, and no replica can become a hot spot. Without shared prefixes this is least_loaded.
    """

    wants_prefixes = True

    def choose(self, candidates: Sequence[ReplicaView], request: RouteHint, rng: random.Random) -> int:
        """See Policy."""
        cached = request.cached_tokens
        return lowest([work(view) - cached.get(view.id, 0) for view in candidates], rng)

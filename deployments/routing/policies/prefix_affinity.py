"""Where the first token comes soonest, given what of the prompt is cached where."""

from __future__ import annotations

import random
from collections.abc import Sequence

from deployments.routing.policies.base import ReplicaView, RouteHint
from deployments.routing.policies.work import lowest, work


class PrefixAffinity:
    """The cost of a replica is what stands before the request's first token: its work, and what of the prompt is not
    cached there. One currency, prompt tokens, so that affinity is worth exactly the prefill it saves: a replica with
    the prefix is preferred until its queue is longer by as much, and no replica can become a hot spot. Without shared
    prefixes this is least_loaded.
    """

    wants_prefixes = True

    def choose(self, candidates: Sequence[ReplicaView], request: RouteHint, rng: random.Random) -> int:
        cached = request.cached_tokens
        return lowest([work(view) - cached.get(view.id, 0) for view in candidates], rng)

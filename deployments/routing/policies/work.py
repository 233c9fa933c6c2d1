"""How much a replica has to do, in prompt tokens: the currency in which policies compare replicas."""

from __future__ import annotations

import random
from collections.abc import Sequence

from deployments.routing.policies.base import ReplicaView

TOKENS_PER_REQUEST = 128  # what a running request weighs beside prompt tokens: it slows all that come after it


def requests(view: ReplicaView) -> int:
    """Of the replica's word and this gateway's own count the larger holds: the word is late, and knows of others."""
    return max(view.load.waiting + view.load.running, view.num_requests)


def work(view: ReplicaView) -> int:
    """Prompt tokens yet to be computed, and some for each request.

    The replica's word counts only if it has others' requests: of its own this gateway knows more, namely what was sent
    in this moment, and what of the waiting prompts is cached.
    """
    load = view.load
    theirs, own = load.waiting + load.running, view.num_requests
    if theirs > own:
        return max(view.queued_tokens, load.pending_tokens) + TOKENS_PER_REQUEST * theirs
    return view.queued_tokens + TOKENS_PER_REQUEST * own


def lowest(costs: Sequence[float], rng: random.Random) -> int:
    """Where the smallest cost is. Ties are drawn, or every gateway would send its next request to the same replica."""
    least = min(costs)
    return rng.choice([i for i, cost in enumerate(costs) if cost == least])

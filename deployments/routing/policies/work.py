"""How much work a replica has, in prompt tokens, by which policies compare replicas."""

from __future__ import annotations

import random
from collections.abc import Sequence

from deployments.routing.policies.base import ReplicaView

TOKENS_PER_REQUEST = 128  # what a running request weighs beside prompt tokens: it slows all that come after it


def requests(view: ReplicaView) -> int:
    """How many requests a replica has.

    The larger of its report and this gateway's own count: the report is late, but includes other gateways' requests.
    """
    return max(view.load.waiting + view.load.running, view.num_requests)


def work(view: ReplicaView) -> int:
    """Prompt tokens that are still to be computed, and TOKENS_PER_REQUEST for each request.

    The replica's report counts only if it has more requests than this gateway sent: of its own requests the gateway
    knows more, namely those just sent, and how much of their prompts is cached.
    """
    load = view.load
    theirs, own = load.waiting + load.running, view.num_requests
    if theirs > own:
        return max(view.queued_tokens, load.pending_tokens) + TOKENS_PER_REQUEST * theirs
    return view.queued_tokens + TOKENS_PER_REQUEST * own


def lowest(costs: Sequence[float], rng: random.Random) -> int:
    """The index of the smallest cost. Ties are drawn, or all gateways would send their next request to one replica."""
    least = min(costs)
    return rng.choice([i for i, cost in enumerate(costs) if cost == least])

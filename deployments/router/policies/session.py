"""All requests of a session to the same replica, as long as that is fair."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

from deployments.router.policies.base import ReplicaView, RouteHint
from deployments.router.policies.work import lowest, requests, work

_BOUND, _SLACK = 1.25, 2.0  # times the mean number of requests, and some: beyond, sessions go to their next replica


class Session:
    """Rendezvous hashing with bounded load (Thaler and Ravishankar, 1998; Mirrokni, Thorup and Zadimoghaddam, 2018):
    when a replica comes or goes only its own share of the sessions moves, and a few busy sessions cannot overload one.
    Requests without a session go where the least work is."""

    def choose(self, candidates: Sequence[ReplicaView], request: RouteHint, rng: random.Random) -> int:
        if request.session is None:
            return lowest([work(view) for view in candidates], rng)
        open_requests = [requests(view) for view in candidates]
        bound = _BOUND * sum(open_requests) / len(candidates) + _SLACK
        key = blake2b(request.session.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        fair = [i for i, n in enumerate(open_requests) if n < bound]
        return max(fair, key=lambda i: blake2b(candidates[i].id.encode(), key=key, digest_size=8).digest())

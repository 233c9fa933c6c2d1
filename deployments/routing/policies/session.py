"""Sends all requests of a session to the same replica, unless that one is overloaded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from deployments.routing.policies.base import ReplicaView, RouteHint
from deployments.routing.policies.work import lowest, requests, work

_MASK, _ODD = 2**64 - 1, 0xFF51AFD7ED558CCD
_BOUND, _SLACK = 1.25, 2.0  # a replica with _BOUND * mean + _SLACK requests is full: sessions go to their next one


class Session:
    """Rendezvous hashing with bounded load (Thaler and Ravishankar, 1998; Mirrokni, Thorup and Zadimoghaddam, 2018).

    When a replica comes or goes, only its own share of the sessions moves, and a few busy sessions cannot overload a
    replica. Requests without a session go to the replica with the least work.
    """

    wants_prefixes = False

    def choose(self, candidates: Sequence[ReplicaView], request: RouteHint, rng: random.Random) -> int:
        """See Policy."""
        if request.session is None:
            return lowest([work(view) for view in candidates], rng)
        open_requests = [requests(view) for view in candidates]
        bound = _BOUND * sum(open_requests) / len(candidates) + _SLACK
        session = _point(request.session)
        scores = [
            # Two rounds of multiply and shift mix 128 bits well enough, in a tenth of a digest's time.
            ((x := (session ^ _replica_point(view.id)) * _ODD & _MASK) ^ x >> 32) * _ODD & _MASK if n < bound else -1
            for view, n in zip(candidates, open_requests, strict=True)
        ]
        return scores.index(max(scores))


def _point(name: str) -> int:
    """A 64-bit hash, the same in every gateway."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


_replica_point = lru_cache(4096)(_point)

"""The interface of a policy, and what it knows of replicas and requests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from deployments.channel.replica_info import Load


class ReplicaView(NamedTuple):
    """One replica as one gateway sees it.

    `load` is what the replica reports of all gateways' requests, some tens of milliseconds old. The rest is what this
    gateway did there, and is exact. `num_requests`: requests that are open. `queued_tokens`: prompt tokens of those
    without a first token, less those believed to be cached there. `last_chosen`: the number of the pool's choice that
    last fell on this replica; 0: none yet. `ttft_s`: a moving average of the TTFT; None: no request has had a token.

    It is a tuple, since a view of each replica is made for each choice: a frozen dataclass takes three times as long.
    """

    id: str
    load: Load
    num_requests: int
    queued_tokens: int
    last_chosen: int
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class RouteHint:
    """What a policy knows of the request.

    Requests of the same `session` belong together. `cached_tokens`: by replica id, how many prompt tokens are believed
    to be in its prefix cache; a missing id means 0. Empty for a policy without `wants_prefixes`.
    """

    prompt_tokens: int
    session: str | None = None
    cached_tokens: Mapping[str, int] = field(default_factory=dict)


class Policy(Protocol):
    """Chooses a replica. `wants_prefixes`: whether it looks at RouteHint.cached_tokens, which take time to look up."""

    wants_prefixes: ClassVar[bool]

    def choose(self, candidates: Sequence[ReplicaView], request: RouteHint, rng: random.Random) -> int:
        """An index into `candidates`, which are never empty and could all take the request.

        Pure: every random number is drawn from `rng`.
        """
        ...

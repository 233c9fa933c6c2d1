"""What a policy is told and what it answers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from deployments.channel.replica_info import Load


class ReplicaView(NamedTuple):
    """One replica as one gateway sees it. `load` is the replica's own word, of all gateways' requests, some tens of
    milliseconds old; the rest is what this gateway did, and is exact: requests open there, prompt tokens of those
    without a first token yet as far as they are not believed to be cached there, when it was last chosen (a count of
    choices; 0 never), and a moving average of the time to the first token (None: no request has had one).

    A tuple, since one of each replica is made for each choice: a frozen dataclass takes three times as long."""

    id: str
    load: Load
    num_requests: int
    queued_tokens: int
    last_chosen: int
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class RouteHint:
    """What is known of the request that looks for a replica. `session`: requests with the same one belong together.
    `cached_tokens`: how much of the prompt is believed to be in a replica's prefix cache, by replica id; else 0. Empty
    for a policy that does not want it."""

    prompt_tokens: int
    session: str | None = None
    cached_tokens: Mapping[str, int] = field(default_factory=dict)


class Policy(Protocol):
    """`wants_prefixes`: it looks at RouteHint.cached_tokens, which is not cheap to find out."""

    wants_prefixes: ClassVar[bool]

    def choose(self, candidates: Sequence[ReplicaView], request: RouteHint, rng: random.Random) -> int:
        """An index into `candidates`, which are never empty and all fit to take the request. Pure: draws from `rng`
        alone."""
        ...

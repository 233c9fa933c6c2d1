"""Who can serve what: everything plan() needs to know. Frozen; a change makes a new table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deployments.config.failures import Failure


@dataclass(frozen=True, slots=True)
class Target:
    """A pool of ours, or an upstream when `external`. `max_tokens`: the longest prompt and answer together that it is
    meant for, its context class; None: any. `room`: the longest it can take, as it reports; None: not known.
    `abilities`: what it can do beyond text."""

    name: str
    external: bool = False
    zone: str = ""
    region: str = ""
    max_tokens: int | None = None
    room: int | None = None
    abilities: frozenset[str] = frozenset()

    @property
    def longest(self) -> int | None:
        """The longest prompt and answer together that it takes, as far as is known."""
        return min((limit for limit in (self.max_tokens, self.room) if limit is not None), default=None)

    def fits(self, num_tokens: int) -> bool:
        """Whether so many tokens, prompt and answer together, are not too many for it."""
        return self.longest is None or num_tokens <= self.longest


@dataclass(frozen=True, slots=True)
class Share:
    """`weight` is relative to the route's other shares."""

    target: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Shadow:
    """A copy of `share` (0..1) of the requests goes to `target`; its answers are dropped."""

    target: str
    share: float


@dataclass(frozen=True, slots=True)
class Limits:
    """How long and how often a route tries. None: no limit, no hedging. `deadline_s`: of the whole answer.
    `first_token_s`: of each attempt. `hedge_after_s`: without a first token for so long, a second attempt runs beside
    the first. `max_resumptions`: how often one answer may go on elsewhere after its replica was lost. `retry_on`: which
    failures make the next target be asked. `resume_within_s`: how long an answer waits to go on when nobody is up to do
    that: Serve replaces a replica that has failed."""

    deadline_s: float | None = None
    first_token_s: float | None = None
    hedge_after_s: float | None = None
    max_resumptions: int = 2
    retry_on: frozenset[Failure] = frozenset(Failure)
    resume_within_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Route:
    """One model id that clients send. `shares` divide its requests; `fallbacks` are asked after them, in order."""

    model: str
    shares: tuple[Share, ...]
    fallbacks: tuple[str, ...] = ()
    shadows: tuple[Shadow, ...] = ()
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class TierRule:
    """What a tier may use. `targets` None: all. `queue_share`: of the longest queue a pool allows, how much may stand
    there when one of this tier comes: tiers with less are shed first."""

    targets: frozenset[str] | None = None
    queue_share: float = 1.0


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """`revision` tells tables apart, nothing more."""

    targets: Mapping[str, Target]
    routes: Mapping[str, Route]
    tiers: Mapping[str, TierRule] = field(default_factory=dict)
    revision: str = ""

    def with_room(self, room: Mapping[str, int]) -> RoutingTable:
        """With what pools have reported, by name."""
        told = {name: replace(self.targets[name], room=tokens) for name, tokens in room.items() if name in self.targets}
        return replace(self, targets={**self.targets, **told})

"""Decides which destinations may serve a request, and in which order they are asked. Takes some microseconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

from deployments.config.routing_table import Limits, RoutingTable, Share, Target, TierRule


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """One HTTP request as the plan sees it.

    `session`, or `id` without one, decides which share of a split it belongs to: equal ones go the same way.
    `num_tokens`: the longest prompt with its answer. `needs`: abilities that a destination must have. `zone` and
    `region` are the gateway's own.
    """

    model: str
    id: str = ""
    session: str | None = None
    tier: str = "default"
    num_tokens: int = 0
    needs: frozenset[str] = frozenset()
    zone: str = ""
    region: str = ""


class Unfit(StrEnum):
    """Why no destination of a route may serve a request."""

    TIER = "tier"
    ABILITY = "ability"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """`candidates` are asked in order until one gives a first token, and `shadows` get a copy of the request.

    Without candidates, `unfit` says why. For `queue_share` see TierRule.
    """

    candidates: tuple[str, ...]
    shadows: tuple[str, ...] = ()
    queue_share: float = 1.0
    limits: Limits = field(default_factory=Limits)
    unfit: Unfit | None = None


_ANY = TierRule()
_NO_LIMIT = math.inf


def plan(request: RouteRequest, table: RoutingTable) -> RoutePlan | None:
    """The plan for a request. None: no route has the model.

    All shares of the route are candidates, before its fallbacks. Shares whose context is just long enough come first,
    so that long contexts stay free for long prompts; then shares in the gateway's zone, then in its region; then the
    weights decide.
    """
    route = table.routes.get(request.model)
    if route is None:
        return None
    rule = table.tiers.get(request.tier, _ANY)
    weighted = [share for share in route.shares if share.weight > 0]
    names = [share.target for share in weighted]
    names += [name for name in route.fallbacks if name not in names]
    fit: dict[str, Target] = {}
    unfit = Unfit.TIER
    for name in names:
        target = table.targets[name]
        if rule.targets is not None and name not in rule.targets:
            continue
        if not request.needs <= target.abilities:
            unfit = Unfit.ABILITY if unfit is Unfit.TIER else unfit
        elif not target.fits(request.num_tokens):
            unfit = Unfit.CONTEXT
        else:
            fit[name] = target
    key = request.session or request.id
    shares = [share for share in weighted if share.target in fit]
    if len(shares) > 1:
        shares.sort(key=lambda share: _rank(share, fit[share.target], request, key))
    first = [share.target for share in shares]
    return RoutePlan(
        candidates=(*first, *(name for name in fit if name not in first)),
        shadows=tuple(s.target for s in route.shadows if _unit(f"shadow {s.target}", request.id) < s.share),
        queue_share=rule.queue_share,
        limits=route.limits,
        unfit=None if fit else unfit,
    )


def _rank(share: Share, target: Target, request: RouteRequest, key: str) -> tuple[float, int, float]:
    """The sort key of a share: the smallest is asked first.

    The last part is weighted rendezvous hashing (Schindelhauer and Schomaker, 2005): each share comes first as often as
    its weight says, and a change of weights moves no more requests than it must.
    """
    context = _NO_LIMIT if target.max_tokens is None else target.max_tokens
    distance = 2
    if target.zone and target.zone == request.zone:
        distance = 0
    elif target.region and target.region == request.region:
        distance = 1
    return (context, distance, -math.log(_unit(share.target, key)) / share.weight)


def _unit(what: str, key: str) -> float:
    """A number in (0, 1), the same for the same two strings."""
    digest = blake2b(f"{what}\n{key}".encode("utf-8", "surrogatepass"), digest_size=7).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**56

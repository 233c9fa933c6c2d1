"""What the router is asked and what it answers. Plain data; the choice is a pure function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """One HTTP request as the router sees it. Smaller `priority` is more important."""

    model: str
    priority: int = 0


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """Pools to try in order, until one gives a first token. Deadline in seconds from now, None: none. For `valid_s`
    from now on equal requests would get this same plan, so that nobody needs to ask."""

    candidates: tuple[str, ...]
    priority: int
    deadline_s: float | None = None
    valid_s: float = 0.0


_STATIC_S = 1.0  # the table changes only with the application


def plan(request: RouteRequest, pools: Mapping[str, tuple[str, ...]]) -> RoutePlan | None:
    """`pools`: model id -> the pools that serve it, preferred first. None: nobody serves the model."""
    candidates = pools.get(request.model)
    return RoutePlan(candidates, request.priority, valid_s=_STATIC_S) if candidates else None

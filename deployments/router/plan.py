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
    """Pools to try in order, until one gives a first token. Deadline in seconds from now, None: none."""

    candidates: tuple[str, ...]
    priority: int
    deadline_s: float | None = None


def plan(request: RouteRequest, pools: Mapping[str, tuple[str, ...]]) -> RoutePlan | None:
    """`pools`: model id -> the pools that serve it, preferred first. None: nobody serves the model."""
    candidates = pools.get(request.model)
    return RoutePlan(candidates, request.priority) if candidates else None

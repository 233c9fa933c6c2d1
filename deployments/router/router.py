"""ModelRouter: answers one unary plan per request and never touches tokens."""

from __future__ import annotations

from collections.abc import Mapping

from deployments.router.plan import RoutePlan, RouteRequest, plan


class ModelRouter:
    def __init__(self, pools: Mapping[str, tuple[str, ...]]) -> None:
        self._pools = dict(pools)

    async def plan(self, request: RouteRequest) -> RoutePlan | None:
        return plan(request, self._pools)

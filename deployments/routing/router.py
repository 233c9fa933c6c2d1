"""ModelRouter keeps the routing table. It sees no requests: gateways plan with copies of the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.config.routing import RoutingConfig, compiled
from deployments.config.routing_table import RoutingTable
from deployments.ray_serve.loopback import keep_on_loopback


class ModelRouter:
    """Serve calls reconfigure() with the deployment's `user_config`, at the start and whenever that has changed."""

    def __init__(
        self,
        pools: tuple[str, ...],
        upstreams: tuple[str, ...],
        tiers: Mapping[str, int],
        standalone: tuple[str, ...] = (),
    ) -> None:
        """For the arguments see config.routing.compiled()."""
        keep_on_loopback()
        self._pools = pools
        self._upstreams = upstreams
        self._tiers = dict(tiers)
        self._standalone = standalone
        self._table = self._compiled(RoutingConfig())

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Compiles the table anew. Raises ValueError, which Serve reports, and keeps the old table then."""
        self._table = self._compiled(RoutingConfig.model_validate(user_config))

    async def table(self, known: str) -> RoutingTable | None:
        """The routing table. None: its revision is still `known`."""
        return None if known == self._table.revision else self._table

    def _compiled(self, config: RoutingConfig) -> RoutingTable:
        return compiled(config, self._pools, self._upstreams, self._tiers, self._standalone)

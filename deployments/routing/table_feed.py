"""Keeps a gateway's copy of the routing table up to date."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.config.routing_table import RoutingTable
from deployments.observe.log import log
from deployments.ray_serve.handles import CALL_ERRORS

POLL_S = 0.5  # seconds between two questions: how late a change of the table may take effect
_PATIENCE_S = 2.0  # seconds that the router may take to answer


async def follow(
    router: DeploymentHandle[Any], on_table: Callable[[RoutingTable], None], poll_s: float = POLL_S
) -> None:
    """Asks ModelRouter for its table until cancelled, and calls `on_table` with each new one.

    While the router does not answer, the gateway keeps the table that it has.
    """
    known, lost = "", False
    while True:
        call: Any = router.table.remote(known)
        try:
            async with asyncio.timeout(_PATIENCE_S):  # wait_for() may swallow a cancellation in Python 3.11
                table: RoutingTable | None = await call
            if table is not None:
                on_table(table)
                known = table.revision
            lost = False
        except Exception as error:  # whatever it is: without this task no change would ever take effect again
            if not lost:
                expected = isinstance(error, (TimeoutError, *CALL_ERRORS))
                log.warning(
                    "no routing table from the router: %s", type(error).__name__, exc_info=None if expected else error
                )
            lost = True
        finally:
            call.cancel()
        await asyncio.sleep(poll_s)

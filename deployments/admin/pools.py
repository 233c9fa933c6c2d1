"""The part of the admin API that is about what runs: pools, their replicas, and which of those take requests.

Unlike the rest it is there without a key database too; the audit log then is the server's own log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from deployments.accounts.records import Actor
from deployments.admin.http import answer, change, enter, in_thread, page, routes_of
from deployments.admin.types import DrainBody, PoolAnswer, PoolList
from deployments.api.errors import INVALID, ApiError, clip
from deployments.api.openapi import Operation
from deployments.api.services import Services
from deployments.channel.replica_info import ReplicaState, ReplicaStatus

log = logging.getLogger("ray.serve")

_POOLS, _DRAIN = "/admin/v1/pools", "/admin/v1/drain"
POOL_OPERATIONS = (
    Operation("GET", _POOLS, "Pools and their replicas.", {200: PoolList}, "admin"),
    Operation(
        "POST", _DRAIN, "Takes replicas out of rotation.", {200: PoolAnswer}, "admin", body=DrainBody, errors=(404,)
    ),
)


def pool_routes(services: Services) -> list[BaseRoute]:
    """The routes that are there without a key database too."""
    admin = _Pools(services)
    return routes_of({_POOLS: {"GET": admin.pools}, _DRAIN: {"POST": admin.drain}})


class _Pools:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def pools(self, request: Request) -> Response:
        await enter(self._services, request)
        return page([self._pool(name, states) for name, states in (await self._services.backend.pools()).items()])

    async def drain(self, request: Request) -> Response:
        by, body = await change(self._services, request, DrainBody)
        backend = self._services.backend
        pools = await backend.pools()
        if body.pool not in pools:
            raise _unknown("pool", body.pool, list(pools))
        if body.replica is not None and body.replica not in (known := [s.replica_id for s in pools[body.pool]]):
            raise _unknown("replica", body.replica, known)
        await self._note(by, body)
        if body.draining:
            states = await backend.drain(body.pool, body.replica, body.timeout_s)
        else:
            states = await backend.undrain(body.pool, body.replica)
        return answer(self._pool(body.pool, states))

    def _pool(self, name: str, states: Sequence[ReplicaState]) -> dict[str, Any]:
        statuses = {state.status for state in states}
        status = (
            "up" if ReplicaStatus.ACTIVE in statuses
            else "drained" if ReplicaStatus.DRAINED in statuses
            else self._services.backend.unavailable_reason(name)
        )  # fmt: skip
        return {"id": name, "object": "pool", "status": status, "replicas": [_replica(state) for state in states]}

    async def _note(self, by: Actor, body: DrainBody) -> None:
        action = "replica.drain" if body.draining else "replica.undrain"
        target = body.pool if body.replica is None else f"{body.pool}/{body.replica}"
        log.info("%s %s, by %s, request %s", action, target, by.name, by.request_id)
        if (accounts := self._services.accounts) is not None:
            await in_thread(accounts, accounts.directory.note, by, action, target, {"timeout_s": body.timeout_s})


def _unknown(param: str, given: str, known: Sequence[str]) -> ApiError:
    names = ", ".join(f"'{name}'" for name in known) or "none"
    return ApiError(404, f"There is no {param} '{clip(given)}' here. There is: {names}.", INVALID, param)


def _replica(state: ReplicaState) -> dict[str, Any]:
    return {
        "id": state.replica_id,
        "object": "replica",
        "status": "draining" if state.status is ReplicaStatus.DRAINED and state.streams else state.status,
        "streams": state.streams,
        "running": state.running,
        "waiting": state.waiting,
    }

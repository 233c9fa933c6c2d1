"""Sends copies of requests to a pool on trial. Nobody waits for their answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from deployments.observe.log import log
from deployments.routing.destinations import Destination, RoutedRequest
from deployments.routing.losses import ReplicaLosses

_MAX_COPIES = 64  # under way; more are not made, so that a slow pool on trial costs the gateway little
_LESS_IMPORTANT = 1_000_000  # added to the priority: a copy never delays a client


class Mirror:
    """Sends copies, and keeps those that are under way."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, destination: Destination, request: RoutedRequest) -> None:
        """Sends a copy, without waiting. Does nothing when the destination is down or too many copies are under way."""
        if len(self._tasks) >= _MAX_COPIES or not destination.up:
            return
        task = asyncio.create_task(_run(destination, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Gives up the copies that are under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _run(destination: Destination, request: RoutedRequest) -> None:
    requests = tuple(
        replace(r, request_id=f"{r.request_id}.shadow", priority=r.priority + _LESS_IMPORTANT) for r in request.requests
    )
    try:
        stream = await destination.begin(replace(request, requests=requests, streamed=False, losses=ReplicaLosses()))
        try:
            async for _ in stream:
                pass
        finally:
            stream.close()
    except Exception as error:
        log.info("a shadow request has failed: %s", error)

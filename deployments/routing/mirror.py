"""Copies of requests that go to a pool on trial. Nobody waits for their answers."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

from deployments.observe.log import log
from deployments.routing.destinations import Ask, Place

_MAX = 64  # under way: more are not made
_LATER = 1_000_000  # added to the priority: a copy never delays a client


class Shadows:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, place: Place, ask: Ask) -> None:
        """Returns at once. No copy is made for a place that is down or full."""
        if len(self._tasks) >= _MAX or not place.up:
            return
        task = asyncio.create_task(_run(place, ask))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _run(place: Place, ask: Ask) -> None:
    requests = tuple(
        replace(r, request_id=f"{r.request_id}.shadow", priority=r.priority + _LATER) for r in ask.requests
    )
    try:
        async with aclosing(place.attempt(replace(ask, requests=requests, streamed=False))) as stream:
            async for _ in stream:
                pass
    except Exception as error:
        log.info("a shadow request has failed: %s", error)

"""Where a request can be served: a pool of ours or an upstream, behind one interface."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from deployments.config.failures import Failure
from deployments.routing.cold_start import ColdStart
from deployments.routing.hints import Origin
from deployments.upstream.client import Upstream, UpstreamCall
from engine.types import GenerateRequest, TokenDelta

Deltas = AsyncGenerator[list[TokenDelta], None]


@dataclass(frozen=True, slots=True)
class Ask:
    """What a place is asked. `queue_share`: how much of its queue the request may use."""

    requests: tuple[GenerateRequest, ...]
    streamed: bool
    origin: Origin
    queue_share: float = 1.0


class Place(Protocol):
    """`attempt` may raise before its first item and then says nothing of the request; what it raises later ends the
    answer, unless it is StreamLostError and another place has the same `weights`."""

    @property
    def weights(self) -> str | None:
        """Places with the same go on with each other's answers. None: with nobody's."""

    @property
    def up(self) -> bool:
        """Whether it would take a request now, as far as is known."""

    @property
    def returning(self) -> bool:
        """While it is not up: whether it may soon be again without anybody's doing."""

    @property
    def succeeding(self) -> bool:
        """While it is not up: whether who takes over may be there already, and only not be known here yet."""

    @property
    def resting(self) -> ColdStart | None:
        """While it has no replica and would start one for a request: what does that."""

    @property
    def suspect(self) -> frozenset[Failure]:
        """Failures that speak against the place, so that its circuit counts them."""

    def attempt(self, ask: Ask) -> Deltas: ...


class UpstreamPlace:
    """An external server: always thought to be up, until its circuit opens."""

    weights = None
    up = True
    returning = False
    succeeding = False
    resting = None
    suspect = frozenset({Failure.TIMEOUT, Failure.ERROR, Failure.OVERLOADED})

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def attempt(self, ask: Ask) -> Deltas:
        call = UpstreamCall(
            path=ask.origin.path,
            fields=ask.origin.fields,
            request_ids=[request.request_id for request in ask.requests],
            n=ask.requests[0].sampling.n,
            max_tokens=max(request.sampling.max_tokens for request in ask.requests),
        )
        stream = await self._upstream.begin(call)
        try:
            async for deltas in stream:
                yield deltas
        finally:
            stream.close()

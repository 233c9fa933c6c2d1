"""What can serve a request: a pool of ours or an upstream, behind one interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deployments.config.failures import Failure
from deployments.routing.cold_start import ColdStart
from deployments.routing.failures import failure_of
from deployments.routing.hints import RoutingHints
from deployments.upstream.client import Upstream, UpstreamCall
from deployments.upstream.errors import UpstreamFullError
from engine.types import GenerateRequest, TokenDelta


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a destination is asked. `queue_share`: how much of its queue the request may use. `first_token_s`: how long
    the first deltas may take; None: as long as they like.
    """

    requests: tuple[GenerateRequest, ...]
    streamed: bool
    hints: RoutingHints
    queue_share: float = 1.0
    first_token_s: float | None = None


class DeltaStream(Protocol):
    """An answer that has begun: an async iterator, to be used once and then closed.

    What it raises ends the answer, unless it is one of failures.RESUMABLE and another destination has the same weights.
    """

    def __aiter__(self) -> DeltaStream: ...

    async def __anext__(self) -> list[TokenDelta]: ...

    def close(self) -> None:
        """Aborts what still runs. Not a coroutine: nothing can cut it short."""


class Destination(Protocol):
    """A pool or an upstream, as one gateway sees it."""

    @property
    def weights(self) -> str | None:
        """Destinations with the same go on with each other's answers. None: with nobody's."""

    @property
    def up(self) -> bool:
        """Whether it would take a request now, as far as is known."""

    @property
    def may_recover(self) -> bool:
        """While it is not up: whether it may soon be again without anybody's doing."""

    @property
    def successor_expected(self) -> bool:
        """While it is not up: whether who takes over may be there already, and only not be known here yet."""

    @property
    def cold_start(self) -> ColdStart | None:
        """While it has no replica and would start one for a request: what does that."""

    def suspects(self, error: Exception) -> bool:
        """Whether this error speaks against the destination, so that its circuit counts it."""

    async def begin(self, request: RoutedRequest) -> DeltaStream:
        """An answer whose first deltas are there. What it raises says nothing of the request. TimeoutError after the
        request's `first_token_s`.
        """
        ...


class UpstreamDestination:
    """An external server: always thought to be up, until its circuit opens."""

    weights = None
    up = True
    may_recover = False
    successor_expected = False
    cold_start = None

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    def suspects(self, error: Exception) -> bool:
        """See Destination."""
        failures = (Failure.TIMEOUT, Failure.ERROR, Failure.OVERLOADED)
        return failure_of(error) in failures and not isinstance(error, UpstreamFullError)

    async def begin(self, request: RoutedRequest) -> DeltaStream:
        """See Destination."""
        call = UpstreamCall(
            path=request.hints.path,
            fields=request.hints.fields,
            request_ids=[one.request_id for one in request.requests],
            n=request.requests[0].sampling.n,
            max_tokens=max(one.sampling.max_tokens for one in request.requests),
        )
        return await self._upstream.begin(call, request.first_token_s)

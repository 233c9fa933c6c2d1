"""What can serve a request, a pool or an upstream, behind one interface."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from deployments.config.failures import Failure
from deployments.routing.cold_start import ColdStart
from deployments.routing.failures import failure_of
from deployments.routing.hints import RoutingHints
from deployments.routing.losses import ReplicaLosses
from deployments.upstream.client import Upstream, UpstreamCall
from deployments.upstream.errors import UpstreamFullError, UpstreamUnreadError
from engine.types import GenerateRequest, TokenDelta


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """One client's request as destinations get it.

    `queue_share`: how much of a pool's queue it may use, 0 to 1. `first_token_s`: how many seconds the first deltas may
    take; None: any number. `weights`: those that the client's part of the answer was made with, and the rest must be;
    None before there is one. `losses` counts the replicas that were lost with it.
    """

    requests: tuple[GenerateRequest, ...]
    streamed: bool
    hints: RoutingHints
    queue_share: float = 1.0
    first_token_s: float | None = None
    weights: str | None = None
    losses: ReplicaLosses = field(default_factory=ReplicaLosses)


class DeltaStream(Protocol):
    """An answer that has begun: an async iterator, to be used once and then closed.

    An error ends the answer, unless it is one of failures.RESUMABLE and another replica has the same weights.
    """

    @property
    def weights(self) -> str | None:
        """Names the weights that the answer is made with: others with the same ones can go on with it. None: nobody
        can."""

    def __aiter__(self) -> DeltaStream: ...

    async def __anext__(self) -> list[TokenDelta]: ...

    def close(self) -> None:
        """Aborts what still runs. It is no coroutine, so that no cancellation can interrupt it."""


class Destination(Protocol):
    """A pool or an upstream, as one gateway sees it."""

    def may_have(self, weights: str) -> bool:
        """Whether it has or may soon have these weights, and so could go on with an answer that they have begun."""

    def up_with(self, weights: str) -> bool:
        """Whether it would go on now with an answer that these weights have begun."""

    @property
    def up(self) -> bool:
        """Whether it would take a request now, as far as is known."""

    @property
    def may_recover(self) -> bool:
        """While it is not up: whether it may soon be up again by itself."""

    @property
    def successor_expected(self) -> bool:
        """While it is not up: whether a new replica may be running that this gateway does not know of yet."""

    @property
    def cold_start(self) -> ColdStart | None:
        """What starts a replica of a pool that has none but would start one for a request. None otherwise."""

    def suspects(self, error: Exception) -> bool:
        """Whether this error of begin() or of a stream counts as a failure for the destination's circuit."""

    async def begin(self, request: RoutedRequest) -> DeltaStream:
        """Returns an answer whose first deltas have arrived.

        Raises TimeoutError after the request's `first_token_s`, and the errors that failures.failure_of() names when
        the destination does not serve the request; another one may serve it then.
        """
        ...


class UpstreamDestination:
    """An external server. It counts as up; its circuit notices when it is not."""

    up = True
    may_recover = False
    successor_expected = False
    cold_start = None

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    def may_have(self, weights: str) -> bool:
        """See Destination."""
        return False

    def up_with(self, weights: str) -> bool:
        """See Destination."""
        return False

    def suspects(self, error: Exception) -> bool:
        """See Destination."""
        failures = (Failure.TIMEOUT, Failure.ERROR, Failure.OVERLOADED)
        return failure_of(error) in failures and not isinstance(error, UpstreamFullError | UpstreamUnreadError)

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

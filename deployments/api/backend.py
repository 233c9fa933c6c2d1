"""What the HTTP side needs from whatever runs the models. Nothing here knows HTTP, and nothing below it does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from deployments.channel.replica_info import ReplicaState, UnavailableReason
from deployments.routing.hints import RoutingHints
from deployments.routing.served_model import ServedModel
from engine.types import GenerateRequest, TokenDelta


class Backend(Protocol):
    """Runs requests. One instance per gateway process, used from its event loop only."""

    def models(self) -> Mapping[str, ServedModel]:
        """All models that are configured, also while none of their replicas is up. Cheap: called per request."""

    def generate(
        self, model_id: str, requests: tuple[GenerateRequest, ...], streamed: bool, hints: RoutingHints
    ) -> AsyncGenerator[list[TokenDelta], None]:
        """The deltas of all the requests and their choices, interleaved, each choice ending with exactly one delta
        that has a finish_reason; as they come if `streamed`, else twice a second. Closing or cancelling the iterator
        aborts whatever still runs. Raises, here or from the iterator, before the first delta: InvalidRequestError and
        its kin, QueueFullError and RoutingError; and ReplicaLostError at any time."""

    async def awaken(self, model_id: str) -> None:
        """Starts a model that rests and waits until it is up: until one has been, its `max_model_len` is not known.
        Raises ModelUnavailableError."""

    async def ready(self) -> bool:
        """Whether every model would take a request now, if only by starting for it."""

    def unavailable_reason(self, pool: str) -> UnavailableReason:
        """Why none of its replicas takes requests, when that is so. Raises KeyError."""

    async def pools(self) -> Mapping[str, Sequence[ReplicaState]]:
        """Every pool with those of its replicas that answer, by id. Raises ReplicaSilentError for one that does not."""

    async def drain(self, pool: str, replica_id: str | None, within_s: float | None) -> Sequence[ReplicaState]:
        """Takes a replica, or all that a pool has, out of rotation, for all gateways: no new requests. What still runs
        there after `within_s` goes on elsewhere; None: is never moved. The states of the pool's replicas after that.
        Raises KeyError when there is no such pool."""

    async def undrain(self, pool: str, replica_id: str | None) -> Sequence[ReplicaState]:
        """Undoes drain()."""

    async def metrics(self) -> bytes | None:
        """Prometheus text, or None when there is none to give."""

    async def close(self) -> None:
        """Ends its connections and tasks. No request may be under way."""

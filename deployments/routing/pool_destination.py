"""A pool as a destination: begins a request at one of its replicas, and refuses requests when the queue is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice

from deployments.channel.client import ReplicaStream
from deployments.channel.errors import StreamLostError
from deployments.config.failures import Failure
from deployments.routing.backlog import retry_after_s
from deployments.routing.cold_start import ColdStart
from deployments.routing.destinations import RoutedRequest
from deployments.routing.errors import RETRY_AFTER_S, ModelUnavailableError, OverloadedError
from deployments.routing.failures import failure_of
from deployments.routing.policies.base import RouteHint
from deployments.routing.pool import Pool
from deployments.routing.prefixes import chain
from engine.errors import EngineDeadError, QueueFullError
from engine.types import GenerateRequest

MAX_TRIES = 3  # replicas that are asked before another destination is, when they are lost or full
_BLOCKS_AT_ONCE = 256  # of a prompt that are hashed without a pause: a quarter of a millisecond


class PoolDestination:
    """See destinations.Destination.

    `max_queue_s`: how many seconds of work may wait; None: as much as the engines' queues hold. `clock` gives seconds.
    """

    def __init__(self, pool: Pool, max_queue_s: float | None, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._max_queue_s = max_queue_s
        self._clock = clock

    def may_have(self, weights: str) -> bool:
        """See Destination."""
        return self._pool.may_have(weights)

    def up_with(self, weights: str) -> bool:
        """See Destination."""
        return self._pool.up_with(weights)

    @property
    def up(self) -> bool:
        """See Destination."""
        return self._pool.up

    @property
    def may_recover(self) -> bool:
        """See Destination."""
        return self._pool.may_recover

    @property
    def successor_expected(self) -> bool:
        """See Destination."""
        return self._pool.successor_expected

    @property
    def cold_start(self) -> ColdStart | None:
        """See Destination."""
        return self._pool.cold_start

    def suspects(self, error: Exception) -> bool:
        """Only a timeout counts: that a replica is lost is known from its connection."""
        return failure_of(error) is Failure.TIMEOUT

    async def begin(self, request: RoutedRequest) -> ReplicaStream:
        """See Destination.

        Raises OverloadedError when too much work waits already, QueueFullError or ModelUnavailableError when no replica
        takes the request, StreamLostError or EngineDeadError when the one that took it was lost, and RepeatedLossError
        when that is not the first one.
        """
        self._check_queue(request.queue_share)
        async with asyncio.timeout(request.first_token_s):
            return await self._begin_at_any(request)

    async def _begin_at_any(self, request: RoutedRequest) -> ReplicaStream:
        pool, keys = self._pool, await self.prefix_keys(request.requests)
        tokens = sum(len(one.prompt) for one in request.requests)
        refusal: Exception = ModelUnavailableError(RETRY_AFTER_S)
        tried: set[str] = set()
        while len(tried) < MAX_TRIES:
            cached = pool.prefixes.cached_tokens(keys)
            replica = pool.choose(RouteHint(tokens, request.hints.session, cached), tried, request.weights)
            if replica is None:
                break
            name = replica.address.replica_id
            tried.add(name)
            pool.prefixes.add(name, keys)
            began_s = self._clock()
            stream = replica.open(request.requests, request.streamed, tokens - cached.get(name, 0))
            try:
                await stream.begin()
            except (StreamLostError, EngineDeadError, QueueFullError) as error:
                stream.close()
                refusal = error
                if stream.accepted:
                    request.losses.add(error)
            except BaseException:
                stream.close()
                raise
            else:
                pool.note_first_token(name, self._clock() - began_s)
                return stream
        raise refusal

    def _check_queue(self, queue_share: float) -> None:
        if self._max_queue_s is None:
            return
        wait_s = retry_after_s(self._pool.backlog_s(), self._max_queue_s, queue_share)
        if wait_s is not None:
            raise OverloadedError(wait_s)

    async def prefix_keys(self, requests: Sequence[GenerateRequest]) -> list[bytes]:
        """The keys of the longest prompt's blocks. Empty when the policy does not look at them.

        Several prompts of one HTTP request are most often variants of one another. Hashing a long prompt takes a
        millisecond, so other tasks get a turn in between.
        """
        info = self._pool.info
        if info is None or not info.prefix_root or not self._pool.wants_prefixes:
            return []
        longest = max(requests, key=lambda request: len(request.prompt))
        rest = chain(dict(info.prefix_root), longest.cache_salt, longest.prompt, self._pool.prefixes.block_tokens)
        keys = list(islice(rest, _BLOCKS_AT_ONCE))
        while len(keys) % _BLOCKS_AT_ONCE == 0 and (more := list(islice(rest, _BLOCKS_AT_ONCE))):
            keys += more
            await asyncio.sleep(0)
        return keys

"""A pool of replicas as a place where requests are served: one request's tries at it, and when it is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice

from deployments.channel.errors import StreamLostError
from deployments.config.failures import Failure
from deployments.routing.backlog import backlog_s, retry_after_s
from deployments.routing.cold_start import ColdStart
from deployments.routing.destinations import Ask, Deltas
from deployments.routing.errors import RETRY_AFTER_S, ModelUnavailableError, OverloadedError
from deployments.routing.policies.base import RouteHint
from deployments.routing.pool import Pool
from deployments.routing.prefixes import chain
from engine.errors import EngineDeadError, QueueFullError
from engine.types import GenerateRequest, TokenDelta

_AT_ONCE = 256  # blocks of a prompt that are hashed without a pause: a quarter of a millisecond
_TRIES = 3  # replicas that may lose a request before its first token, or have no room for it
_SMOOTH = 0.05  # weight of the newest answer in the average length
_ANSWER_TOKENS = 128.0  # until the pool has given an answer


class PoolPlace:
    """See places.Place. `max_queue_s`: how much work may wait, in seconds; None: all that the engines' queues take."""

    suspect = frozenset({Failure.TIMEOUT})  # a lost replica is seen by its connection

    def __init__(self, pool: Pool, max_queue_s: float | None, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._max_queue_s = max_queue_s
        self._clock = clock
        self._answer_tokens = _ANSWER_TOKENS

    @property
    def weights(self) -> str | None:
        info = self._pool.info
        return info.fingerprint if info is not None else None

    @property
    def up(self) -> bool:
        return self._pool.up

    @property
    def returning(self) -> bool:
        return self._pool.returning

    @property
    def succeeding(self) -> bool:
        return self._pool.succeeding

    @property
    def resting(self) -> ColdStart | None:
        return self._pool.resting

    async def attempt(self, ask: Ask) -> Deltas:
        """Raises OverloadedError when too much waits already, QueueFullError or ModelUnavailableError when no replica
        takes it, and StreamLostError when the one that did is lost."""
        self._admit(ask.queue_share)
        pool, keys = self._pool, await self._chain(ask.requests)
        tokens = sum(len(request.prompt) for request in ask.requests)
        refusal: Exception = ModelUnavailableError(RETRY_AFTER_S)
        tried: set[str] = set()
        while len(tried) < _TRIES:
            cached = pool.prefixes.cached_tokens(keys)
            replica = pool.choose(RouteHint(tokens, ask.origin.session, cached), tried)
            if replica is None:
                break
            name = replica.address.replica_id
            tried.add(name)
            pool.prefixes.add(name, keys)
            began_s: float | None = self._clock()
            stream = replica.open(ask.requests, ask.streamed, tokens - cached.get(name, 0))
            try:
                async for deltas in stream:
                    if began_s is not None:
                        pool.first_token(name, self._clock() - began_s)
                        began_s = None
                    self._note_lengths(deltas)
                    yield deltas
                return
            except (StreamLostError, EngineDeadError) as lost:
                if stream.started:
                    raise
                refusal = lost
            except QueueFullError as full:
                refusal = full
            finally:
                stream.close()
        raise refusal

    def _admit(self, queue_share: float) -> None:
        if self._max_queue_s is None:
            return
        wait_s = retry_after_s(backlog_s(self._pool.backlog(), self._answer_tokens), self._max_queue_s, queue_share)
        if wait_s is not None:
            raise OverloadedError(wait_s)

    async def _chain(self, requests: Sequence[GenerateRequest]) -> list[bytes]:
        """Of the longest prompt: of several the others are most often its variants. Empty where nobody looks at it.
        Others get their turn meanwhile: a long prompt takes a millisecond."""
        info = self._pool.info
        if info is None or not info.prefix_root or not self._pool.wants_prefixes:
            return []
        longest = max(requests, key=lambda request: len(request.prompt))
        rest = chain(dict(info.prefix_root), longest.cache_salt, longest.prompt, self._pool.prefixes.block_tokens)
        keys = list(islice(rest, _AT_ONCE))
        while len(keys) % _AT_ONCE == 0 and (more := list(islice(rest, _AT_ONCE))):
            keys += more
            await asyncio.sleep(0)
        return keys

    def _note_lengths(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self._answer_tokens += _SMOOTH * (delta.num_completion_tokens - self._answer_tokens)

"""Whether a request that is ready to run may run now, under its tenant's limits, and what it has cost in the end.

A request costs one request, as many running sequences as it has choices, and of tokens its prompt and all that was
generated. What counts when it goes wrong: a
mistake of the client's (4xx) is a request without tokens; a client that leaves pays for what was done for it; a failure
on this side (5xx) costs nothing, unless it broke off a stream, of which the client has a part. A request that is
refused costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from typing import Literal

from deployments.api.body import ClientGoneError
from deployments.api.errors import from_exception
from deployments.api.progress import GenerationProgress
from deployments.api.rate_limit_headers import headers, too_many
from deployments.api.requests import Caller, PreparedRequest
from deployments.config.gateway import GatewayConfig
from deployments.config.tiers import UNLIMITED
from deployments.limits.applicable import limits_of
from deployments.limits.base import (
    NOTHING,
    Amount,
    Limit,
    LimitKind,
    LimitState,
    LimitStore,
    LimitStoreDownError,
    Refusal,
    Reservation,
)
from deployments.observe.request_log import RequestTrace

log = logging.getLogger(__name__)

Verdict = Literal["admitted", "requests", "tokens", "concurrent", "too_large", "store_down"]
Settle = Callable[[Amount], None]  # to be called once, with what was used; never blocks and never fails
_ONE_REQUEST = Amount(1, 0)


class RateLimiter:
    """`store` keeps the counts. `on_verdict(tier, verdict, tokens)` and `on_settled(tier, tokens)` are told of every
    request that has limits."""

    def __init__(
        self,
        config: GatewayConfig,
        store: LimitStore,
        on_verdict: Callable[[str, Verdict, int], None] | None = None,
        on_settled: Callable[[str, int], None] | None = None,
    ) -> None:
        self._config = config
        self._store = store
        self._on_verdict = on_verdict
        self._on_settled = on_settled

    async def reserve(self, prepared: PreparedRequest, trace: RequestTrace) -> Settle:
        """Takes all that the request may need. Raises ApiError 429, and LimitStoreDownError when nobody can tell."""
        amount = Amount(1, prepared.most_tokens, sum(r.sampling.n for r in prepared.requests))
        try:
            return await self._reserve(prepared, amount, trace)
        finally:
            trace.mark("limit", time.perf_counter())

    async def count_client_error(self, caller: Caller, error: Exception, trace: RequestTrace) -> None:
        """A request that will be answered with `error` before it could be reserved for. Raises ApiError 429 when the
        tenant has no requests left, so that a broken client cannot go on for ever."""
        if isinstance(error, ClientGoneError):
            return
        reported = from_exception(error)
        if reported is None or reported.status == 429 or not 400 <= reported.status < 500:
            await self.add_headers(caller, trace)
            return
        await self.count_request(caller, trace)

    async def count_request(self, caller: Caller, trace: RequestTrace) -> None:
        """A request that generates nothing. Raises ApiError 429 when the tenant has no requests left."""
        wanted = limits_of(caller.tenant, caller.tier, self._config.limits, trace.model)
        wanted = tuple(limit for limit in wanted if limit.kind is not LimitKind.CONCURRENT)
        if not wanted:
            return
        reservation = Reservation(uuid.uuid4().hex, caller.tenant.org, wanted, _ONE_REQUEST)
        try:
            outcome = await self._store.reserve(reservation)
        except LimitStoreDownError:
            return
        trace.headers.update(headers(outcome.states))
        if isinstance(outcome, Refusal):
            self._tell(caller.tier_name, _verdict(outcome), 0)
            raise too_many(outcome, trace.model or "any model")
        self._store.settle(reservation, _ONE_REQUEST)

    async def add_headers(self, caller: Caller, trace: RequestTrace) -> None:
        """Notes the tenant's limits for the answer of a request that does not count."""
        if wanted := limits_of(caller.tenant, caller.tier, self._config.limits, None):
            try:
                trace.headers.update(headers(await self._store.peek(wanted, caller.tenant.org)))
            except LimitStoreDownError:
                log.debug("no rate limit headers: the store is out of reach")

    async def close(self) -> None:
        """To be called when no request runs any more."""
        await self._store.close()

    async def _reserve(self, prepared: PreparedRequest, amount: Amount, trace: RequestTrace) -> Settle:
        tier = self._config.tiers.get(prepared.tier, UNLIMITED)
        wanted = limits_of(prepared.tenant, tier, self._config.limits, prepared.model.id)
        if not wanted:
            return lambda _: None
        reservation = Reservation(uuid.uuid4().hex, prepared.tenant.org, wanted, amount)
        try:
            outcome = await self._store.reserve(reservation)
        except LimitStoreDownError:
            self._tell(prepared.tier, "store_down", 0)
            raise
        trace.headers.update(headers(outcome.states))
        if isinstance(outcome, Refusal):
            self._tell(prepared.tier, _verdict(outcome), 0)
            raise too_many(outcome, prepared.model.id)
        self._tell(prepared.tier, "admitted", amount.tokens)
        return lambda used: self._settle(reservation, prepared.tier, used)

    def _settle(self, reservation: Reservation, tier: str, used: Amount) -> None:
        self._store.settle(reservation, used)
        if self._on_settled is not None:
            self._on_settled(tier, used.tokens)

    def _tell(self, tier: str, verdict: Verdict, tokens: int) -> None:
        if self._on_verdict is not None:
            self._on_verdict(tier, verdict, tokens)


def _verdict(refusal: Refusal) -> Verdict:
    match refusal:
        case Refusal(retry_after_s=None):
            return "too_large"
        case Refusal(state=LimitState(limit=Limit(kind=LimitKind.REQUESTS))):
            return "requests"
        case Refusal(state=LimitState(limit=Limit(kind=LimitKind.TOKENS))):
            return "tokens"
    return "concurrent"


def cost(progress: GenerationProgress, failure: BaseException | None, streamed: bool) -> Amount:
    """What a request took that ended with `failure`, or None when it was answered to its end. `streamed`: tokens went
    out as they came."""
    spent = Amount(1, progress.prompt_tokens + progress.completion_tokens)
    if failure is None or isinstance(failure, (asyncio.CancelledError, ClientGoneError)):
        return spent
    if streamed and progress.completion_tokens:
        return spent
    reported = from_exception(failure) if isinstance(failure, Exception) else None
    return _ONE_REQUEST if reported is not None and reported.status < 500 else NOTHING

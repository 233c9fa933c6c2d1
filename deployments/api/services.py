"""What all endpoints share: the gateway's settings and its helpers, who asks, and the body of the request."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import Receive, Scope

from deployments.accounts.auth import Authenticator, authorization_of, visible
from deployments.accounts.static_keys import StaticKeys
from deployments.accounts.tenant import Tenant
from deployments.api.backend import Backend
from deployments.api.body import content_coding, decode, read_body
from deployments.api.errors import ApiError, unknown_tier
from deployments.api.middleware import trace_of
from deployments.api.rate_limiter import RateLimiter
from deployments.api.requests import Caller
from deployments.api.web_pages import refuse_web_pages
from deployments.config.gateway import GatewayConfig
from deployments.config.tiers import Tier, resolve
from deployments.routing.errors import ModelUnavailableError
from deployments.routing.served_model import ServedModel

if TYPE_CHECKING:
    from deployments.accounts.accounts import Accounts

_INLINE_BYTES = 2048  # reading and tokenizing this much takes less time than a hop to a thread and back

_NO_ADMIN = (
    "This server needs no API keys, and therefore has no admin API: anybody could use it. Start it with an API key "
    "that has the scope `admin`."
)
# Of ignored fields in the header that names them, which clients choose: enough to recognise them by.
_SHOWN_NAMES = 10
_SHOWN_CHARS = 64
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]|,")

R = TypeVar("R")


class Services:
    """One per gateway process. `accounts` None: there is no key database."""

    def __init__(
        self, config: GatewayConfig, accounts: Accounts | None, backend: Backend, limiter: RateLimiter
    ) -> None:
        """Raises ValueError when one of the config's keys is unusable."""
        self.config = config
        self.accounts = accounts
        self.backend = backend
        self.limiter = limiter
        self._keys = Authenticator(StaticKeys(config.api_keys), accounts.key_cache if accounts else None)

    async def authenticate(self, scope: Scope, needs: str, show_limits: bool = False) -> Caller:
        """Who sent the request, if the key has the scope that it `needs`. `show_limits`: the answer of a request that
        does not count against the rate limits tells of them all the same. Raises ApiError, and what
        Authenticator.admit() does."""
        if self.config.keyless:
            refuse_web_pages(scope["headers"], self.config.allowed_hosts, self.config.cors_origins)
            if needs == "admin":
                raise ApiError(403, _NO_ADMIN)
        tenant = await self._keys.admit(authorization_of(scope), needs)
        trace = trace_of(scope)
        trace.tenant, trace.org, trace.project = tenant.id, tenant.org, tenant.project
        standing = resolve(self.config.tiers, self.config.default_tier, tenant.tier)
        if standing is None:
            raise unknown_tier(tenant.tier)
        name, tier = standing
        caller = Caller(self.config, self._models(tenant, tier), tenant, name, tier)
        if show_limits:
            await self.limiter.add_headers(caller, trace)
        return caller

    async def read_body(
        self, scope: Scope, receive: Receive, caller: Caller, prepare: Callable[[dict[str, Any], Caller], R]
    ) -> R:
        """`prepare` applied to the JSON body, off the event loop when the body is not small. Raises ApiError,
        BudgetExhaustedError, ModelUnavailableError and what `prepare` raises."""
        if self.accounts is not None:
            self.accounts.check_budget(caller.tenant)
        coding = content_coding(scope["headers"])
        limit = self.config.max_body_bytes
        raw = await read_body(receive, scope["headers"], limit, self.config.body_timeout_s)
        trace = trace_of(scope)
        trace.mark("body", time.perf_counter())

        def decoded(caller: Caller) -> R:
            fields = decode(raw, coding, limit)
            if isinstance(name := fields.get("model"), str) and name in caller.models:
                trace.model = name
            return prepare(fields, caller)

        heavy = len(raw) > _INLINE_BYTES or coding == "gzip"
        try:
            result = await offload(lambda: decoded(caller), heavy)
        except ModelUnavailableError:  # none of its replicas has been up since this gateway started: it may rest
            assert trace.model is not None
            await self.backend.awaken(trace.model)
            awake = replace(caller, models=self._models(caller.tenant, caller.tier))
            result = await offload(lambda: decoded(awake), heavy)
        trace.mark("prepare", time.perf_counter())
        if caller.ignored:
            trace.headers["x-ignored-fields"] = ignored_fields(caller.ignored)
        return result

    def _models(self, tenant: Tenant, tier: Tier) -> Mapping[str, ServedModel]:
        return visible(self.backend.models(), tenant.models, tier.model_names)


def ignored_fields(names: Sequence[str]) -> str:
    """The value of the header that names the fields of a body that were passed over, each once."""
    shown = [_UNPRINTABLE.sub("?", name[:_SHOWN_CHARS]) for name in dict.fromkeys(names)]
    return ", ".join(shown[:_SHOWN_NAMES] + (["..."] if len(shown) > _SHOWN_NAMES else []))


async def offload(work: Callable[[], R], heavy: bool) -> R:
    """The result of `work`, which runs in a thread when it is `heavy`, for more than a millisecond."""
    return await asyncio.to_thread(work) if heavy else work()

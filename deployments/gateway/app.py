"""create_app(): the OpenAI API and the admin API as one ASGI app over a Backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from deployments.admin.pools import POOL_OPERATIONS, pool_routes
from deployments.api.backend import Backend
from deployments.api.endpoints import api_routes, generation_endpoints, unrouted
from deployments.api.middleware import RequestMiddleware
from deployments.api.openapi import OPERATIONS
from deployments.api.rate_limiter import RateLimiter
from deployments.api.services import Services
from deployments.config.gateway import GatewayConfig
from deployments.limits.memory import MemoryStore
from deployments.observe.request_log import RequestLog

if TYPE_CHECKING:
    from deployments.accounts.accounts import Accounts


def create_app(
    config: GatewayConfig,
    backend: Backend,
    on_finished: Callable[[RequestLog], None] | None = None,
    limiter: RateLimiter | None = None,
) -> Starlette:
    """`backend` is used from the event loop that serves the app. `on_finished` must not block. Raises ValueError
    when an API key or the key database's setting is unusable. `limiter` None: limits are counted in this process."""
    accounts: Accounts | None = None
    if config.keys.database:  # what stands on a database takes half a second to import
        from deployments.accounts.accounts import Accounts
        from deployments.admin.routes import ADMIN_OPERATIONS, admin_routes

        accounts = Accounts(config)
    limiter = limiter or RateLimiter(config, MemoryStore())
    services = Services(config, accounts, backend, limiter)
    generation = generation_endpoints(services)
    operations = (*OPERATIONS, *POOL_OPERATIONS, *(ADMIN_OPERATIONS if accounts else ()))
    app = Starlette(
        routes=[
            *api_routes(services, generation, operations),
            *pool_routes(services),
            *(admin_routes(services, accounts) if accounts else ()),
        ],
        middleware=[
            *_cors(config.cors_origins),
            Middleware(RequestMiddleware, on_finished=_each(on_finished, accounts), direct=generation),
        ],
        lifespan=_lifespan(accounts, limiter, backend),
        exception_handlers={HTTPException: unrouted},
    )
    app.router.redirect_slashes = False
    return app


def _lifespan(
    accounts: Accounts | None, limiter: RateLimiter, backend: Backend
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with accounts.lifespan() if accounts else nullcontext():
            yield
            await backend.close()
            await limiter.close()

    return lifespan


def _each(
    on_finished: Callable[[RequestLog], None] | None, accounts: Accounts | None
) -> Callable[[RequestLog], None] | None:
    if accounts is None:
        return on_finished

    def finished(record: RequestLog) -> None:
        accounts.finished(record)
        if on_finished is not None:
            on_finished(record)

    return finished


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Outside of RequestMiddleware, so that pages can read errors too. Keys come in a header: no cookies are needed."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "PUT", "PATCH", "DELETE"),
            allow_headers=("*",),
            expose_headers=("*",),
        )
    ]

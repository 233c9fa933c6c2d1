"""What the handlers of the admin API share: who asks, what for, and answers that nobody on the way may keep."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from deployments.accounts.records import AccountError, Actor, NotFoundError, RevokedError
from deployments.api.body import content_coding, decode, read_body
from deployments.api.errors import INVALID, ApiError, clip, invalid
from deployments.api.middleware import trace_of
from deployments.api.request_types import parse
from deployments.api.services import Services

if TYPE_CHECKING:
    from deployments.accounts.accounts import Accounts

Handler = Callable[[Request], Awaitable[Response]]
B = TypeVar("B", bound=BaseModel)
R = TypeVar("R")


def routes_of(handlers: dict[str, dict[str, Handler]]) -> list[BaseRoute]:
    """`handlers`: path -> method -> handler. One route per path, so that a wrong method is told all the right ones."""
    return [Route(path, _by_method(methods), methods=list(methods)) for path, methods in handlers.items()]


def _by_method(methods: dict[str, Handler]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        handler = methods.get(request.method)
        if handler is None:  # HEAD, which Starlette lets through where there is a GET
            raise HTTPException(405, headers={"Allow": ", ".join(methods)})
        return await handler(request)

    return endpoint


async def enter(services: Services, request: Request) -> Actor:
    """Who asks. Raises ApiError for one who must not."""
    caller = await services.authenticate(request.scope, "admin")
    return Actor(caller.tenant.id, trace_of(request.scope).request_id)


async def change(services: Services, request: Request, kind: type[B]) -> tuple[Actor, B]:
    """Who asks, and the body. No body at all is an empty object."""
    by = await enter(services, request)
    config, headers = services.config, request.scope["headers"]
    coding = content_coding(headers)
    raw = await read_body(request.receive, headers, config.max_body_bytes, config.body_timeout_s)
    fields = decode(raw, coding, config.max_body_bytes) if raw else {}
    return by, parse(kind, fields, "reject")


async def in_thread(accounts: Accounts, work: Callable[..., R], *args: Any) -> R:
    """A call of a store. Raises ApiError, and DatabaseDownError."""
    try:
        return await accounts.threads.call(work, *args)
    except NotFoundError as error:
        raise ApiError(404, f"{clip(str(error), 200)}.", INVALID, error.param) from None
    except RevokedError as error:
        raise ApiError(409, f"{clip(str(error), 200)}.", INVALID, error.param) from None
    except AccountError as error:
        raise invalid(f"{clip(str(error), 300)}.", error.param, "invalid_value") from None


def page(data: Sequence[Any], limit: int | None = None) -> Response:
    """A list as OpenAI shows it. With `limit`, one entry more in `data` says that there is another page."""
    more = limit is not None and len(data) > limit
    return answer({"object": "list", "data": data[:limit], "has_more": more})


def answer(value: Any) -> Response:
    """Not to be kept by anybody on the way: some answers have a secret in them."""
    return Response(orjson.dumps(value), media_type="application/json", headers={"cache-control": "no-store"})

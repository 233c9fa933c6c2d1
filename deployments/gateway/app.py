"""create_app(): the OpenAI API as an ASGI app over a Backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import cached_property
from typing import Any, NoReturn

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from deployments.accounts.accounts import Accounts
from deployments.admin.pools import POOL_OPERATIONS, pool_routes
from deployments.admin.routes import ADMIN_OPERATIONS, admin_routes
from deployments.api.admission import Admission
from deployments.api.backend import Backend
from deployments.api.chat import ChatForm
from deployments.api.completions import CompletionForm
from deployments.api.errors import ApiError, method_not_allowed, model_not_found, unsupported, url_not_found
from deployments.api.generation import Gate, GenerationEndpoint
from deployments.api.middleware import Edge, send_json
from deployments.api.openapi import OPERATIONS, Operation, document
from deployments.api.request_types import EmbeddingsBody, parse
from deployments.api.requests import Caller, chat_job, completion_job, find_model, tokenize
from deployments.config.gateway import GatewayConfig
from deployments.limits.memory import MemoryStore
from deployments.observe.request_log import RequestLog
from deployments.routing.served_model import ServedModel


def create_app(
    config: GatewayConfig,
    backend: Backend,
    on_finished: Callable[[RequestLog], None] | None = None,
    admission: Admission | None = None,
) -> FastAPI:
    """`backend` is used from the event loop that serves the app. `on_finished` must not block. Raises ValueError
    when an API key or the key database's setting is unusable. `admission` None: limits are counted in this process."""
    accounts = Accounts(config) if config.keys.database else None
    admission = admission or Admission(config, MemoryStore())
    gate = Gate(config, accounts, backend, admission)
    operations = (*OPERATIONS, *POOL_OPERATIONS, *(ADMIN_OPERATIONS if accounts else ()))
    info = _Info(gate, config.public_metrics, operations)
    generation = {
        "/v1/chat/completions": GenerationEndpoint(gate, chat_job, ChatForm()),
        "/v1/completions": GenerationEndpoint(gate, completion_job, CompletionForm()),
    }
    routes: list[BaseRoute] = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generation.items()),
        Route("/v1/embeddings", _JsonEndpoint(gate, _no_embeddings), methods=["POST"]),
        Route("/tokenize", _JsonEndpoint(gate, tokenize), methods=["POST"]),
        Route("/v1/models", info.models, methods=["GET"]),
        Route("/v1/models/{model_id:path}", info.model, methods=["GET"]),
        Route("/health", info.ready, methods=["GET"]),
        Route("/health/ready", info.ready, methods=["GET"]),
        Route("/health/live", info.live, methods=["GET"]),
        Route("/metrics", info.metrics, methods=["GET"]),
        Route("/openapi.json", info.openapi, methods=["GET"]),
        *pool_routes(gate),
    ]
    if accounts is not None:
        routes += admin_routes(gate, accounts)
    return FastAPI(
        title="Sluicegate",
        routes=routes,
        openapi_url=None,
        redirect_slashes=False,
        middleware=[
            *_cors(config.cors_origins),
            Middleware(Edge, on_finished=_each(on_finished, accounts), direct=generation),
        ],
        lifespan=_lifespan(accounts, admission),
        exception_handlers={HTTPException: _unrouted},
    )


def _lifespan(
    accounts: Accounts | None, admission: Admission
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with accounts.lifespan() if accounts else nullcontext():
            yield
            await admission.close()

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
    """Outside of Edge, so that pages can read errors too. Keys come in a header, so no cookies are let through."""
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


class _JsonEndpoint:
    """An ASGI app that answers a JSON body with JSON."""

    def __init__(self, gate: Gate, use: Callable[[dict[str, Any], Caller], Any]) -> None:
        self._gate = gate
        self._use = use

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await self._gate.look(scope, "inference")
        answer = await self._gate.read(scope, receive, caller, self._use)
        await send_json(send, 200, orjson.dumps(answer))


class _Info:
    """Everything that is asked with GET. Health needs no key: load balancers have none."""

    def __init__(self, gate: Gate, public_metrics: bool, operations: Sequence[Operation]) -> None:
        self._gate = gate
        self._operations = operations
        self._public_metrics = public_metrics

    async def models(self, request: Request) -> Response:
        caller = await self._gate.look(request.scope, "models.read")
        return _json({"object": "list", "data": [_model(m) for m in caller.models.values()]})

    async def model(self, request: Request) -> Response:
        caller = await self._gate.look(request.scope, "models.read")
        model_id = request.path_params["model_id"]
        if model_id not in caller.models:
            raise model_not_found(model_id)
        return _json(_model(caller.models[model_id]))

    async def live(self, _: Request) -> Response:
        return _json({"status": "live"})

    async def ready(self, _: Request) -> Response:
        ready = await self._gate.backend.ready()
        return _json({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    async def openapi(self, _: Request) -> Response:
        return _json(self._document)

    @cached_property
    def _document(self) -> dict[str, Any]:
        return document(self._operations, ("/metrics",) if self._public_metrics else ())

    async def metrics(self, request: Request) -> Response:
        if not self._public_metrics:
            await self._gate.admit(request.scope, "admin")
        text = await self._gate.backend.metrics()
        if text is None:
            raise url_not_found("GET", "/metrics")
        return Response(text, media_type="text/plain; version=0.0.4")


def _model(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": model.owned_by,
        "max_model_len": model.max_model_len or None,
    } | ({"sampling_defaults": changed} if (changed := model.defaults.changed) else {})


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _no_embeddings(fields: dict[str, Any], caller: Caller) -> NoReturn:
    body = parse(EmbeddingsBody, fields, "ignore")
    model = find_model(caller, body.model)
    raise unsupported("model", f"The model `{model.id}` does not support embeddings.", "unsupported_value")


async def _unrouted(request: Request, error: Exception) -> NoReturn:
    """Paths and methods that match no route. Edge answers what is raised here."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        raise method_not_allowed(request.method, request.url.path, allow)
    if error.status_code == 404:
        raise url_not_found(request.method, request.url.path)
    raise ApiError(error.status_code, str(error.detail))

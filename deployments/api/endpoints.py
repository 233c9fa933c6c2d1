"""The routes of the OpenAI API, and the endpoints that generate nothing: models, health, metrics, /tokenize."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.chat import ChatChunkBuilder, chat_body
from deployments.api.completions import CompletionChunkBuilder, completion_body
from deployments.api.errors import ApiError, method_not_allowed, model_not_found, unsupported, url_not_found
from deployments.api.generation import GenerationEndpoint
from deployments.api.middleware import send_json, trace_of
from deployments.api.openapi import Operation, document
from deployments.api.request_types import EmbeddingsBody, parse
from deployments.api.requests import Caller, find_model, prepare_chat, prepare_completion, tokenize
from deployments.api.services import Services
from deployments.routing.served_model import ServedModel


def generation_endpoints(services: Services) -> dict[str, ASGIApp]:
    """By path; their method is POST."""
    return {
        "/v1/chat/completions": GenerationEndpoint(services, prepare_chat, ChatChunkBuilder, chat_body),
        "/v1/completions": GenerationEndpoint(services, prepare_completion, CompletionChunkBuilder, completion_body),
    }


def api_routes(
    services: Services, generation: Mapping[str, ASGIApp], operations: Sequence[Operation]
) -> list[BaseRoute]:
    """`generation`: see generation_endpoints(). `operations`: what GET /openapi.json describes."""
    info = _Info(services, operations)
    return [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generation.items()),
        Route("/v1/embeddings", _JsonEndpoint(services, _refuse_embeddings), methods=["POST"]),
        Route("/tokenize", _JsonEndpoint(services, tokenize), methods=["POST"]),
        Route("/v1/models", info.models, methods=["GET"]),
        Route("/v1/models/{model_id:path}", info.model, methods=["GET"]),
        Route("/health", info.ready, methods=["GET"]),
        Route("/health/ready", info.ready, methods=["GET"]),
        Route("/health/live", info.live, methods=["GET"]),
        Route("/metrics", info.metrics, methods=["GET"]),
        Route("/openapi.json", info.openapi, methods=["GET"]),
    ]


async def unrouted(request: Request, error: Exception) -> NoReturn:
    """Paths and methods that match no route. RequestMiddleware answers what is raised here."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        raise method_not_allowed(request.method, request.url.path, allow)
    if error.status_code == 404:
        raise url_not_found(request.method, request.url.path)
    raise ApiError(error.status_code, str(error.detail))


class _JsonEndpoint:
    """An ASGI app that answers a JSON body with JSON."""

    def __init__(self, services: Services, answer: Callable[[dict[str, Any], Caller], Any]) -> None:
        self._services = services
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await self._services.authenticate(scope, "inference")
        await self._services.limiter.count_request(caller, trace_of(scope))
        answer = await self._services.read_body(scope, receive, caller, self._answer)
        await send_json(send, 200, orjson.dumps(answer))


class _Info:
    """Everything that is asked with GET. Health needs no key: load balancers have none."""

    def __init__(self, services: Services, operations: Sequence[Operation]) -> None:
        self._services = services
        self._operations = operations
        self._public_metrics = services.config.public_metrics

    async def models(self, request: Request) -> Response:
        caller = await self._services.authenticate(request.scope, "models.read", show_limits=True)
        return _json({"object": "list", "data": [_model(m) for m in caller.models.values()]})

    async def model(self, request: Request) -> Response:
        caller = await self._services.authenticate(request.scope, "models.read", show_limits=True)
        model_id = request.path_params["model_id"]
        if model_id not in caller.models:
            raise model_not_found(model_id)
        return _json(_model(caller.models[model_id]))

    async def live(self, _: Request) -> Response:
        return _json({"status": "live"})

    async def ready(self, _: Request) -> Response:
        ready = await self._services.backend.ready()
        return _json({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    async def openapi(self, _: Request) -> Response:
        return _json(self._document)

    @cached_property
    def _document(self) -> dict[str, Any]:
        return document(self._operations, ("/metrics",) if self._public_metrics else ())

    async def metrics(self, request: Request) -> Response:
        if not self._public_metrics:  # without keys there is no admin: whoever may list the models may read these
            needs = "models.read" if self._services.config.keyless else "admin"
            await self._services.authenticate(request.scope, needs)
        text = await self._services.backend.metrics()
        if text is None:
            raise url_not_found("GET", "/metrics")
        return Response(text, media_type="text/plain; version=0.0.4")


def _model(model: ServedModel) -> dict[str, Any]:
    shown = {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": model.owned_by,
        "max_model_len": model.max_model_len or None,
    }
    changed = model.defaults.changed
    return {**shown, "sampling_defaults": changed} if changed else shown


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _refuse_embeddings(fields: dict[str, Any], caller: Caller) -> NoReturn:
    body = parse(EmbeddingsBody, fields, "ignore")
    model = find_model(caller, body.model)
    raise unsupported("model", f"The model `{model.id}` does not support embeddings.", "unsupported_value")

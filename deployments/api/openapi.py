"""The API's own description, GET /openapi.json: an OpenAPI 3.1 document made from the types that bodies are validated
with.

A new route is one Operation: OPERATIONS has those of create_app; packages with routes of their own hand theirs to
document() as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

from deployments.api.request_types import ChatBody, CompletionBody, EmbeddingsBody, TokenizeBody
from deployments.api.response_types import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Error,
    Health,
    Model,
    ModelList,
    Tokens,
)

Schema = dict[str, Any]

_JSON, _EVENTS = "application/json", "text/event-stream"
_ALWAYS = (400, 431, 500, 503)
_KEYED = (401, 403)
_WITH_BODY = (408, 413, 415)
_LIMITS = ("limit-requests", "limit-tokens", "remaining-requests", "remaining-tokens", "reset-requests", "reset-tokens")
_DURATION = "As `6m0s`, `1.5s` or `20ms`."


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    `body`, `query` and `answers` (status -> body) take what a pydantic TypeAdapter takes, if hashable. An answer of
    None has no body, str is plain text. `events`: the type of the events that come instead when the body asks for
    a stream. `errors`: statuses beyond those every operation of its kind may have. `keyed`: needs an API key.
    Parameters in the path are strings.
    """

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    summary: str
    answers: Mapping[int, Any]
    tag: str = "inference"
    body: Any = None
    query: type[BaseModel] | None = None
    events: Any = None
    errors: tuple[int, ...] = ()
    keyed: bool = True


_GENERATES = (404, 429)
_READY = {200: Health, 503: Health}
OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "The answer to a chat.",
        {200: ChatCompletion},
        body=ChatBody,
        events=ChatCompletionChunk,
        errors=_GENERATES,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "The continuation of one or more prompts.",
        {200: Completion},
        body=CompletionBody,
        events=CompletionChunk,
        errors=_GENERATES,
    ),
    Operation("POST", "/v1/embeddings", "Not supported by any model yet.", {}, body=EmbeddingsBody, errors=(404,)),
    Operation("POST", "/tokenize", "The tokens of a prompt or chat.", {200: Tokens}, body=TokenizeBody, errors=(404,)),
    Operation("GET", "/v1/models", "The models this key may use.", {200: ModelList}),
    Operation("GET", "/v1/models/{model_id}", "One model. Its id may contain slashes.", {200: Model}, errors=(404,)),
    Operation("GET", "/health", "The same as /health/ready.", _READY, "health", keyed=False),
    Operation("GET", "/health/ready", "Whether every model takes requests now.", _READY, "health", keyed=False),
    Operation("GET", "/health/live", "Whether the gateway runs.", {200: Health}, "health", keyed=False),
    Operation("GET", "/metrics", "Prometheus metrics.", {200: str}, "health", errors=(404,)),
    Operation("GET", "/openapi.json", "This document.", {200: dict[str, Any]}, "health", keyed=False),
)


def document(operations: Sequence[Operation], keyless: Collection[str] = ()) -> Schema:
    """The document, ready for JSON. `keyless`: paths that need no key here, whatever their operations say."""
    operations = [replace(o, keyed=False) if o.path in keyless else o for o in operations]
    types = dict.fromkeys(kind for operation in operations for kind in _types(operation))
    adapters = [(kind, "validation", TypeAdapter(kind)) for kind in types]
    found, rest = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    shared: Schema = _plain(rest.get("$defs", {}))
    schemas = {kind: _plain(schema) for (kind, _), schema in found.items()}
    paths: Schema = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas, shared)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sluicegate",
            "version": version("sluicegate"),
            "description": "An OpenAI-compatible API. Streams are server-sent events, whose last is `data: [DONE]`.",
        },
        "paths": paths,
        "components": {
            "schemas": shared,
            "headers": _HEADERS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _types(operation: Operation) -> Iterator[Any]:
    yield Error
    yield from (kind for kind in (operation.body, operation.query, operation.events) if kind is not None)
    yield from (kind for kind in operation.answers.values() if kind not in (None, str))


def _operation(operation: Operation, schemas: Mapping[Any, Schema], shared: Mapping[str, Schema]) -> Schema:
    described: Schema = {
        "operationId": _operation_id(operation),
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": {str(status): answer for status, answer in sorted(_answers(operation, schemas).items())},
        "security": [{"key": []}] if operation.keyed else [],
    }
    in_path = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in in_path
    ]
    if operation.query is not None:
        asked = _plain(operation.query.model_json_schema(ref_template="#/components/schemas/{model}"))
        parameters += [
            {"name": name, "in": "query", "required": name in asked.get("required", ()), "schema": schema}
            for name, schema in asked["properties"].items()
        ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        schema = schemas[operation.body]
        needed = bool(shared.get(schema.get("$ref", "").rpartition("/")[2], schema).get("required"))
        described["requestBody"] = {"required": needed, "content": {_JSON: {"schema": schema}}}
    return described


def _answers(operation: Operation, schemas: Mapping[Any, Schema]) -> dict[int, Schema]:
    errors = {*_ALWAYS, *operation.errors, *(_KEYED if operation.keyed else ())}
    if operation.body is not None:
        errors.update(_WITH_BODY)
    error = schemas[Error]
    answers = {status: _answer(status, {_JSON: {"schema": error}}) for status in errors}
    for status, kind in operation.answers.items():
        content: Schema
        if kind is None:
            content = {}
        elif kind is str:
            content = {"text/plain": {"schema": {"type": "string"}}}
        else:
            schema = schemas[kind]
            content = {_JSON: {"schema": {"anyOf": [schema, error]} if status >= 400 else schema}}
        if operation.events is not None:
            content[_EVENTS] = {"schema": _event({"anyOf": [schemas[operation.events], error]})}
        answers[status] = _answer(status, content)
    return answers


def _event(payload: Schema) -> Schema:
    """Of each event of a stream: OpenAPI 3.1 has no words for a sequence."""
    json = {"type": "string", "contentMediaType": _JSON, "contentSchema": payload}
    data = {"anyOf": [{"const": "[DONE]", "description": "The last, unless something went wrong."}, json]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _answer(status: int, content: Schema) -> Schema:
    names = ["x-request-id", "openai-processing-ms", "openai-version", "server-timing"]
    names += [f"x-ratelimit-{name}" for name in _LIMITS]
    if status in (429, 503):
        names += ["retry-after", "retry-after-ms"]
    if status == 429:
        names += ["x-should-retry"]
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    answer: Schema = {"description": HTTPStatus(status).phrase, "headers": headers}
    return answer | ({"content": content} if content else {})


def _operation_id(operation: Operation) -> str:
    words = operation.path.removesuffix(".json").replace("{", "").replace("}", "").strip("/").replace("/", "_")
    return f"{operation.method.lower()}_{words}"


def _plain(schema: Any) -> Any:
    """Without the titles pydantic makes up from names, and the default null, which is the same as absence."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    dropped = {"title"} if isinstance(schema.get("title"), str) else set()
    if "default" in schema and schema["default"] is None:
        dropped.add("default")
    return {key: _plain(value) for key, value in schema.items() if key not in dropped}


def _header(description: str, kind: str = "string", required: bool = False) -> Schema:
    return {"description": description, "required": required, "schema": {"type": kind}}


_HEADERS: Schema = {
    "x-request-id": _header("The client's own if it sent a usable one, else a new one.", required=True),
    "openai-processing-ms": _header("Milliseconds until the answer's head.", "integer"),
    "openai-version": _header("The version of the API."),
    "server-timing": _header("Where the time went, by part."),
    "retry-after": _header("Seconds until it is worth trying again.", "integer"),
    "retry-after-ms": _header("The same in milliseconds.", "integer"),
    "x-should-retry": _header("`false` where trying again cannot help."),
    "x-ratelimit-limit-requests": _header("Requests a minute.", "integer"),
    "x-ratelimit-limit-tokens": _header("Tokens a minute.", "integer"),
    "x-ratelimit-remaining-requests": _header("Requests left now.", "integer"),
    "x-ratelimit-remaining-tokens": _header("Tokens left now.", "integer"),
    "x-ratelimit-reset-requests": _header(f"Until all requests are there again. {_DURATION}"),
    "x-ratelimit-reset-tokens": _header(f"Until all tokens are there again. {_DURATION}"),
}

"""The API's description is true: of the routes, of the bodies that come and of the bodies that go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from helpers_gateway import COUNT, COUNT_24_IDS, HI, MODEL, FakeBackend, client, error_of, events_of, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from schemathesis import GenerationMode
from starlette.routing import Route

from deployments.admin.pools import POOL_OPERATIONS
from deployments.admin.routes import ADMIN_OPERATIONS
from deployments.api import response_types as answers
from deployments.api.openapi import OPERATIONS, Operation, document
from deployments.config.gateway import GatewayConfig
from deployments.gateway.app import create_app
from deployments.routing.errors import ReplicaLostError

CHAT, COMP = "/v1/chat/completions", "/v1/completions"
KEY = "sk-tests-0123456789abcdef"
CONFIG = GatewayConfig(api_keys=(KEY,))
CASES = {CHAT: 60, COMP: 60, "/tokenize": 30, "/v1/embeddings": 20, "/v1/models/{model_id}": 10}  # others: 5


def test_every_route_is_described_and_nothing_else() -> None:
    app = create_app(GatewayConfig(), FakeBackend())
    routes = [route for route in app.routes if isinstance(route, Route)]
    there = {(m, r.path.replace(":path", "")) for r in routes for m in r.methods or () if m != "HEAD"}
    assert there == {(operation.method, operation.path) for operation in (*OPERATIONS, *POOL_OPERATIONS)}


async def test_the_document_is_served_without_a_key() -> None:
    async with client(FakeBackend(), CONFIG) as http:
        shown = (await http.get("/openapi.json")).json()
        error_of(await http.get("/docs"), 404)
    assert shown["openapi"].startswith("3.1.")
    chat = shown["paths"][CHAT]["post"]
    assert {"200", "400", "401", "403", "404", "413", "429", "500", "503"} <= chat["responses"].keys()
    assert chat["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
    assert chat["security"] == [{"key": []}] and shown["paths"]["/health"]["get"]["security"] == []
    body = shown["components"]["schemas"]["ChatBody"]
    assert body["required"] == ["model", "messages"]
    assert body["properties"]["temperature"]["anyOf"][0] == {"maximum": 2.0, "minimum": 0.0, "type": "number"}


@pytest.mark.parametrize("public", [False, True])
async def test_open_metrics_are_described_as_open(public: bool) -> None:
    async with client(FakeBackend(), GatewayConfig(api_keys=(KEY,), public_metrics=public)) as http:
        shown = (await http.get("/openapi.json")).json()["paths"]["/metrics"]["get"]
        assert (await http.get("/metrics")).status_code == (200 if public else 401)
    assert shown["security"] == ([] if public else [{"key": []}]) and ("401" in shown["responses"]) != public


def test_a_body_is_required_where_one_of_its_fields_is() -> None:
    paths = document((*OPERATIONS, *ADMIN_OPERATIONS))["paths"]
    assert paths["/v1/completions"]["post"]["requestBody"]["required"] is True
    assert paths["/admin/v1/keys"]["post"]["requestBody"]["required"] is True
    assert paths["/admin/v1/keys/{key_id}/rotate"]["post"]["requestBody"]["required"] is False


def test_bounds_are_described() -> None:
    described = document(OPERATIONS)["components"]["schemas"]["CompletionBody"]["properties"]
    assert described["n"]["anyOf"] == [{"type": "integer", "minimum": 1, "maximum": 128}, {"type": "null"}]


def test_further_operations_may_be_described() -> None:
    more = Operation("DELETE", "/admin/things/{thing_id}", "Ends a thing.", {204: None}, "admin", errors=(404,))
    shown = document((*OPERATIONS, more))["paths"]["/admin/things/{thing_id}"]["delete"]
    assert shown["parameters"][0]["name"] == "thing_id"
    assert "content" not in shown["responses"]["204"] and "401" in shown["responses"]


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        (CHAT, {"messages": HI}),
        (CHAT, {"messages": HI, "n": 2, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}),
        (COMP, {"prompt": COUNT}),
        (COMP, {"prompt": [COUNT, COUNT], "n": 2, "logprobs": 2, "echo": True, "prompt_logprobs": 1}),
    ],
)
async def test_answers_are_as_described(path: str, changes: dict[str, Any]) -> None:
    [operation] = [o for o in OPERATIONS if o.path == path]
    body = {"model": MODEL, "max_tokens": 3, **changes}
    async with client(FakeBackend()) as http:
        whole = await http.post(path, json=body)
        body.pop("prompt_logprobs", None)
        streamed = await http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
        broken = await http.post(path, json={**body, "stream": True})
    TypeAdapter(operation.answers[200]).validate_json(whole.content)
    *events, done = events_of(streamed.content)
    assert done == "[DONE]" and len(events) > 4
    for event in (*events, *events_of(broken.content)[:-1]):
        TypeAdapter(operation.events).validate_python(event)


async def test_the_last_event_of_a_broken_stream_is_as_described() -> None:
    async with client(FakeBackend(fail=ReplicaLostError(), fail_at=2)) as http:
        broken = await http.post(COMP, json={"model": MODEL, "prompt": COUNT, "stream": True})
    TypeAdapter(answers.Error).validate_python(events_of(broken.content)[-1])


def test_descriptions_are_exact() -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(answers.Health).validate_python({"status": "live", "more": 1})


# --------------------------------------------------------------------------------- cases made from the document
class Bearer:
    def get(self, case: Any, context: Any) -> str:
        return KEY

    def set(self, case: Any, data: str, context: Any) -> None:
        case.headers["authorization"] = f"Bearer {data}"


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    backend = FakeBackend(script=lambda request, index: COUNT_24_IDS[:4])
    with serving(backend, CONFIG) as base:
        api = schemathesis.openapi.from_url(f"{base}/openapi.json")
        api.auth()(Bearer)
        api.config.generation.with_security_parameters = False  # else most bad cases are about the key
        yield api
        assert backend.closed == len(backend.calls)


@pytest.mark.sockets
@pytest.mark.slow
@pytest.mark.parametrize("operation", (*OPERATIONS, *POOL_OPERATIONS), ids=lambda o: f"{o.method} {o.path}")
def test_cases_from_the_document(api: Any, operation: Operation) -> None:
    """What the document allows and what it forbids: never a 5xx, an undescribed status, header or body, and nothing
    forbidden is accepted. What it allows may still be refused: it cannot say how much fits into a model's context."""
    endpoint = api[operation.path][operation.method]
    kinds = [endpoint.as_strategy(generation_mode=mode) for mode in GenerationMode]
    excluded = [schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]

    @settings(max_examples=CASES.get(operation.path, 5), deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=st.one_of(kinds), known=st.booleans())
    def check(case: Any, known: bool) -> None:
        if known and isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL
        response = case.call()
        case.validate_response(response, excluded_checks=excluded)

    check()

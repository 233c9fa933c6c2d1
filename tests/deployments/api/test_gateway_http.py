"""Everything around the answers: errors, keys, ids, bodies, health."""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from typing import Any

import httpx
import pytest
from helpers_gateway import COUNT, HI, MODEL, FakeBackend, client, demo_model, error_of, events_of

from deployments.config.gateway import GatewayConfig, StaticKey
from deployments.observe.request_log import RequestLog
from deployments.routing.errors import ModelUnavailableError, ReplicaLostError
from engine.errors import (
    CapacityError,
    ContextLengthError,
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
)

CHAT, COMP = "/v1/chat/completions", "/v1/completions"
BODY = {"model": MODEL, "prompt": COUNT, "max_tokens": 4}
RAW = json.dumps(BODY).encode()
KEY = "sk-tests-0123456789abcdef"
KEYED = GatewayConfig(api_keys=(KEY, "sk-other"))
JSON = {"content-type": "application/json"}


# ------------------------------------------------------------------------------------------------ routes
async def test_models() -> None:
    async with client(FakeBackend()) as http:
        listed = (await http.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert listed["data"][0] == {
            "id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "tests", "max_model_len": 8192
        }  # fmt: skip
        assert (await http.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]  # the id has a slash
        assert error_of(await http.get("/v1/models/nope"), 404)["code"] == "model_not_found"


async def test_tokenize() -> None:
    async with client(FakeBackend()) as http:
        got = (await http.post("/tokenize", json={"model": MODEL, "messages": HI})).json()
        assert (got["count"], got["tokens"][:2], got["max_model_len"]) == (31, [1, 9690], 8192)
        got = (await http.post("/tokenize", json={"model": MODEL, "prompt": COUNT})).json()
        assert got["count"] == 14
        error_of(await http.post("/tokenize", json={"model": MODEL}), 400)
        error_of(await http.post("/tokenize", json={"model": MODEL, "prompt": "x", "messages": HI}), 400)


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "allow"),
    [
        ("GET", CHAT, 405, "method_not_supported", "POST"),
        ("DELETE", COMP, 405, "method_not_supported", "POST"),
        ("POST", "/v1/models", 405, "method_not_supported", "GET, HEAD"),
        ("GET", "/v1/nope", 404, None, None),
        ("GET", "/docs", 404, None, None),
        ("POST", "/v1/completions/", 404, None, None),
    ],
)
async def test_unrouted(method: str, path: str, status: int, code: str | None, allow: str | None) -> None:
    async with client(FakeBackend()) as http:
        response = await http.request(method, path)
    assert error_of(response, status)["code"] == code
    assert response.headers.get("allow") == allow


async def test_embeddings_are_refused_clearly() -> None:
    async with client(FakeBackend()) as http:
        error = error_of(await http.post("/v1/embeddings", json={"model": MODEL, "input": "x"}), 400)
        assert "embeddings" in error["message"]
        error_of(await http.post("/v1/embeddings", json={"model": "nope", "input": "x"}), 404)


async def test_health_needs_no_key_and_follows_the_backend() -> None:
    backend = FakeBackend()
    async with client(backend, KEYED) as http:
        for path in ("/health", "/health/ready", "/health/live"):
            assert (await http.get(path)).status_code == 200
        backend.is_ready = False
        assert (await http.get("/health/ready")).status_code == 503
        assert (await http.get("/health")).status_code == 503
        assert (await http.get("/health/live")).status_code == 200


async def test_metrics() -> None:
    backend = FakeBackend(metrics_text=b"up 1\n")
    async with client(backend, KEYED) as http:
        error_of(await http.get("/metrics"), 401)
        error_of(await http.get("/metrics", headers={"authorization": f"Bearer {KEY}"}), 403)
    admin = GatewayConfig(api_keys=(StaticKey(key=KEY, scopes=("admin",)),))
    async with client(backend, admin) as http:
        response = await http.get("/metrics", headers={"authorization": f"Bearer {KEY}"})
        assert response.text == "up 1\n" and response.headers["content-type"].startswith("text/plain")
        backend.metrics_text = None
        error_of(await http.get("/metrics", headers={"authorization": f"Bearer {KEY}"}), 404)


# -------------------------------------------------------------------------------------------------- keys
@pytest.mark.parametrize("value", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER   {KEY} ", "Bearer sk-other"])
async def test_good_keys(value: str) -> None:
    async with client(FakeBackend(), KEYED) as http:
        assert (await http.post(COMP, json=BODY, headers={"authorization": value})).status_code == 200


@pytest.mark.parametrize(
    "values",
    [[KEY], [f"Basic {KEY}"], ["Bearer "], ["Bearer"], [""], [f"Bearer {KEY},"], [f"Bearer {KEY[:-1]}"],
     [f"Bearer\t{KEY}"], [f"Bearer {KEY} x"], ["Bearer \xff\xfe"], [f"Bearer {KEY}", "Bearer wrong"],
     [f"Bearer {KEY}", f"Bearer {KEY}"]],
)  # fmt: skip
async def test_bad_keys(values: list[str]) -> None:
    backend = FakeBackend()
    headers = [(b"authorization", value.encode("latin-1")) for value in values] + [(b"x-api-key", KEY.encode())]
    async with client(backend, KEYED) as http:
        for path in (CHAT, COMP, "/tokenize", "/v1/embeddings"):
            response = await http.post(path, content=RAW, headers=headers)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert KEY not in response.text
        error_of(await http.get("/v1/models", headers=headers), 401)
    assert not backend.calls


async def test_key_errors_name_the_reason_and_mask_the_key() -> None:
    async with client(FakeBackend(), KEYED) as http:
        assert error_of(await http.post(COMP, json=BODY), 401)["code"] is None
        wrong = {"authorization": "Bearer sk-wrong-key-0123456789abcdef"}
        error = error_of(await http.post(COMP, json=BODY, headers=wrong), 401)
        assert error["message"] == "Incorrect API key provided: sk-...cdef."


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GatewayConfig(api_keys=("env:SLUICE_TEST_KEY",))
    monkeypatch.delenv("SLUICE_TEST_KEY", raising=False)
    with pytest.raises(ValueError, match="SLUICE_TEST_KEY"):
        client(FakeBackend(), config)
    monkeypatch.setenv("SLUICE_TEST_KEY", KEY)
    client(FakeBackend(), config)


async def test_the_salt_is_the_tenants() -> None:
    backend = FakeBackend()
    async with client(backend, KEYED) as http:
        for key, salt in ((KEY, None), (KEY, "s"), ("sk-other", None), ("sk-other", "s")):
            headers = {"authorization": f"Bearer {key}"}
            await http.post(COMP, json={**BODY, "cache_salt": salt}, headers=headers)
    salts = [call[0].cache_salt for call in backend.calls]
    assert len(set(salts)) == 4
    async with client(backend, KEYED) as http:  # a client that copies another's salt gains nothing
        body = {**BODY, "cache_salt": salts[0]}
        await http.post(COMP, json=body, headers={"authorization": "Bearer sk-other"})
    assert backend.calls[-1][0].cache_salt not in salts


# ---------------------------------------------------------------------------------------- ids and headers
async def test_common_headers() -> None:
    async with client(FakeBackend()) as http:
        responses = [await http.post(COMP, json=BODY), await http.post(COMP, json=BODY), await http.get("/v1/nope")]
        responses.append(await http.post(COMP, json={**BODY, "stream": True}))
    assert len({r.headers["x-request-id"] for r in responses}) == 4
    for response in responses:
        assert response.headers["openai-processing-ms"].isdigit()
        assert response.headers["openai-version"]
    assert "engine;dur=" in responses[0].headers["server-timing"]
    assert responses[3].headers["content-type"] == "text/event-stream; charset=utf-8"


@pytest.mark.parametrize("value", ["", "x" * 129, "a b", "a\tb", "caf\xe9", "a;b"])
async def test_odd_request_ids_are_replaced(value: str) -> None:
    async with client(FakeBackend()) as http:
        response = await http.post(COMP, json=BODY, headers=[(b"x-request-id", value.encode("latin-1"))])
    assert response.status_code == 200
    assert response.headers["x-request-id"].startswith("req_")


async def test_a_request_id_is_echoed_but_never_a_key() -> None:
    backend = FakeBackend()
    async with client(backend) as http:
        for _ in range(2):
            response = await http.post(COMP, json=BODY, headers={"x-request-id": "same-id-1"})
            assert response.headers["x-request-id"] == "same-id-1"
    first, second = (call[0].request_id for call in backend.calls)
    assert first != second and "same-id-1" not in first + second


async def test_header_flood_is_431() -> None:
    async with client(FakeBackend()) as http:
        for headers in ({"x-a": "a" * 70_000}, {f"x-{i}": "a" for i in range(300)}):
            response = await http.post(COMP, json=BODY, headers=headers)
            error_of(response, 431)
            assert response.headers["connection"] == "close"


@pytest.mark.parametrize(
    "headers",
    [[("content-length", "5"), ("transfer-encoding", "chunked")], [("content-length", "-1")],
     [("content-length", "5"), ("content-length", "6")]],
)  # fmt: skip
async def test_ambiguous_framing_is_400(headers: list[tuple[str, str]]) -> None:
    async with client(FakeBackend()) as http:
        request = http.build_request("POST", COMP, content=RAW)
        request.headers = httpx.Headers([*headers, ("content-type", "application/json")])
        error_of(await http.send(request), 400)


# ------------------------------------------------------------------------------------------------ bodies
@pytest.mark.parametrize(
    ("raw", "headers", "status"),
    [
        (b'{"model": ', JSON, 400),
        (b"[]", JSON, 400),
        (b"null", JSON, 400),
        (b"", JSON, 400),
        (b"  \n", JSON, 400),
        (b"\xef\xbb\xbf" + RAW, JSON, 400),
        (b"[" * 100_000, JSON, 400),
        (b'{"a":' * 5000, JSON, 400),
        (RAW.replace(b"Count", b"\xff"), JSON, 400),
        (b"model=m&prompt=x", {"content-type": "application/x-www-form-urlencoded"}, 415),
        (RAW, {"content-type": "text/plain"}, 415),
        (RAW, {"content-type": ""}, 415),
        (RAW, {"content-type": "application/json; charset=utf-8"}, 200),
        (RAW, {"content-type": "application/vnd.api+json"}, 200),
        (RAW, {**JSON, "content-encoding": "identity"}, 200),
        (RAW, {**JSON, "content-encoding": "br"}, 415),
        (RAW, {**JSON, "content-encoding": "nonsense"}, 415),
        (RAW, {**JSON, "content-encoding": "gzip"}, 400),
        (gzip.compress(RAW), {**JSON, "content-encoding": "gzip"}, 200),
        (gzip.compress(RAW), {**JSON, "content-encoding": "GZIP"}, 200),
        (gzip.compress(RAW)[:-12], {**JSON, "content-encoding": "gzip"}, 400),
        (gzip.compress(RAW)[:-4], {**JSON, "content-encoding": "gzip"}, 400),
        (gzip.compress(RAW) + b"x", {**JSON, "content-encoding": "gzip"}, 400),
        (gzip.compress(gzip.compress(RAW)), {**JSON, "content-encoding": "gzip, gzip"}, 415),
        (RAW + b" " * 9_000_000, JSON, 413),
    ],
    ids=range(25),
)
async def test_bodies(raw: bytes, headers: dict[str, str], status: int) -> None:
    async with client(FakeBackend()) as http:
        response = await http.post(COMP, content=raw, headers=headers)
    if status == 200:
        assert response.status_code == 200, response.text
    else:
        assert error_of(response, status)["type"] == "invalid_request_error"


async def test_gzip_bomb_is_refused_at_the_limit() -> None:
    squeeze = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(squeeze.compress(b" " * 1_000_000) for _ in range(50)) + squeeze.flush()
    async with client(FakeBackend()) as http:
        error_of(await http.post(COMP, content=bomb, headers={**JSON, "content-encoding": "gzip"}), 413)


@pytest.mark.parametrize("escape", [r"\ud83d", r"x \ude00 y", r"\ude00\ud83d"])
@pytest.mark.parametrize("stream", [False, True])
async def test_lone_surrogates(escape: str, stream: bool) -> None:
    async with client(FakeBackend()) as http:
        for field in ('"prompt": "@"', '"prompt": "x", "stop": ["@"]', '"prompt": "x", "model": "@"', '"@": 1'):
            raw = f'{{"model": "{MODEL}", "stream": {str(stream).lower()}, {field}}}'.replace("@", escape)
            error_of(await http.post(COMP, content=raw.encode()), 400)
        raw = f'{{"model": "{MODEL}", "prompt": "\\ud83d\\ude00"}}'
        assert (await http.post(COMP, content=raw.encode())).status_code == 200


# ----------------------------------------------------------------------------------- errors of the backend
BACKEND_ERRORS: list[tuple[Exception, int, str, str | None]] = [
    (InvalidRequestError("no such thing", "top_k"), 400, "invalid_request_error", None),
    (ContextLengthError("too long", "prompt"), 400, "invalid_request_error", "context_length_exceeded"),
    (CapacityError("never fits", "max_tokens"), 400, "invalid_request_error", None),
    (ModelUnavailableError(3.2), 503, "service_unavailable_error", "model_not_ready"),
    (QueueFullError("full"), 503, "service_unavailable_error", "server_is_overloaded"),
    (DeadlineError("late"), 503, "service_unavailable_error", "server_is_overloaded"),
    (ReplicaLostError(), 503, "server_error", None),
    (EngineDeadError("died in /usr/lib/x.py"), 503, "server_error", None),
    (ZeroDivisionError("secret /usr/lib/x.py"), 500, "server_error", None),
]


@pytest.mark.parametrize(("raised", "status", "kind", "code"), BACKEND_ERRORS, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token(
    raised: Exception, status: int, kind: str, code: str | None, stream: bool
) -> None:
    backend = FakeBackend(fail=raised)
    async with client(backend) as http:
        response = await http.post(COMP, json={**BODY, "stream": stream})
    error = error_of(response, status)
    assert (error["type"], error["code"], error["param"]) == (kind, code, getattr(raised, "param", None))
    assert "secret" not in error["message"]
    assert backend.closed == 1
    if status == 503:
        assert 1 <= int(response.headers["retry-after"]) <= 120
        assert int(response.headers["retry-after-ms"]) >= 1


@pytest.mark.parametrize("raised", [ReplicaLostError(), ZeroDivisionError("secret")])
async def test_in_the_middle_of_a_stream(raised: Exception) -> None:
    finished: list[RequestLog] = []
    async with client(FakeBackend(fail=raised, fail_at=2), on_finished=finished.append) as http:
        response = await http.post(COMP, json={**BODY, "stream": True})
        assert response.status_code == 200
        events = events_of(response.content)
        assert events[-1].keys() == {"error"} and events[-1]["error"]["type"] == "server_error"
        assert "[DONE]" not in events and "secret" not in response.text
        assert all(c["choices"][0]["finish_reason"] is None for c in events[:-1])
        error_of(await http.post(COMP, json=BODY), 500 if isinstance(raised, ZeroDivisionError) else 503)
    assert finished[0].status == 200 and finished[0].error is not None


@pytest.mark.parametrize("end_at", [0, 2])
async def test_a_stream_that_just_ends_is_an_error(end_at: int) -> None:
    async with client(FakeBackend(end_at=end_at)) as http:
        error_of(await http.post(COMP, json=BODY), 503)
        response = await http.post(COMP, json={**BODY, "stream": True})
    assert response.status_code == (503 if end_at == 0 else 200)
    assert b"[DONE]" not in response.content and b'"error"' in response.content


async def test_internal_errors_are_logged_with_the_request_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="deployments.api")
    async with client(FakeBackend(fail=ZeroDivisionError("secret"))) as http:
        response = await http.post(COMP, json=BODY, headers={"x-request-id": "find-me"})
    assert error_of(response, 500)["message"].startswith("The server had an error")
    assert "find-me" in caplog.text and "ZeroDivisionError" in caplog.text


async def test_a_model_that_is_still_loading_is_503() -> None:
    async with client(FakeBackend(served={MODEL: demo_model(max_model_len=0)})) as http:
        response = await http.post(COMP, json=BODY)
        assert error_of(response, 503)["code"] == "model_not_ready"
        assert response.headers["retry-after"] == "5"
        assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] is None


# ------------------------------------------------------------------------------------------------- records
async def test_one_record_per_request() -> None:
    finished: list[RequestLog] = []
    async with client(FakeBackend(cached=3), KEYED, on_finished=finished.append) as http:
        headers = {"authorization": f"Bearer {KEY}"}
        await http.post(COMP, json=BODY, headers=headers)
        await http.post(COMP, json={**BODY, "stream": True, "n": 2}, headers=headers)
        await http.post(COMP, json={**BODY, "temperature": -1}, headers=headers)
        await http.post(COMP, json={**BODY, "model": "m" * 50}, headers=headers)
        await http.post(COMP, json=BODY)
        await http.get("/health")
    shown = [(r.status, r.model, r.stream, r.completion_tokens, r.error) for r in finished]
    assert shown == [
        (200, MODEL, False, 4, None),
        (200, MODEL, True, 8, None),
        (400, MODEL, False, 0, "decimal_below_min_value"),
        (404, None, False, 0, "model_not_found"),
        (401, None, False, 0, "invalid_request_error"),
    ]
    first: Any = finished[0]
    assert (first.prompt_tokens, first.cached_tokens, first.finish_reasons) == (14, 3, ("length",))
    assert (first.queue_s, first.prefill_s, first.decode_s) == (0.001, 0.002, 0.003)
    assert 0 < first.ttft_s <= first.total_s and first.parts_s.keys() == {"body", "prepare", "limit", "engine"}
    assert sum(first.parts_s.values()) == pytest.approx(first.ttft_s)
    assert first.tenant.startswith("key-") and KEY not in str(first)

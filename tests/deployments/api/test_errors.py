"""What a client is told of each error that accounts, routing, upstreams and the engine raise."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from deployments.accounts.errors import BudgetExhaustedError, BudgetHeldError, KeyRefusedError, MissingScopeError
from deployments.accounts.records import DatabaseDownError
from deployments.api.errors import ApiError, from_exception
from deployments.limits.base import LimitStoreDownError
from deployments.routing.errors import (
    ModelStartError,
    ModelUnavailableError,
    OverloadedError,
    ReplicaLostError,
    ReplicaSilentError,
    UnableError,
    UnknownModelError,
)
from deployments.upstream.errors import UpstreamRefusedError
from engine.errors import ContextLengthError, DeadlineError, EngineDeadError, InvalidRequestError, QueueFullError

UNAVAILABLE = "service_unavailable_error"


def soon(ms: int) -> dict[str, str]:
    return {"retry-after": str(-(-ms // 1000)), "retry-after-ms": str(ms)}


TABLE: list[tuple[Exception, int, str, str | None, str | None, dict[str, str]]] = [
    (
        KeyRefusedError("no", missing=True),
        401,
        "invalid_request_error",
        None,
        None,
        {"www-authenticate": "Bearer"},
    ),
    (
        KeyRefusedError("no"),
        401,
        "invalid_request_error",
        None,
        "invalid_api_key",
        {"www-authenticate": "Bearer"},
    ),
    (MissingScopeError("admin"), 403, "invalid_request_error", None, "insufficient_permissions", {}),
    (
        BudgetExhaustedError("used up", 7.2),
        429,
        "insufficient_quota",
        None,
        "insufficient_quota",
        {"retry-after": "8", "x-should-retry": "false"},
    ),
    (BudgetHeldError("held"), 429, "tokens", None, "rate_limit_exceeded", soon(1000)),
    (DatabaseDownError("x"), 503, UNAVAILABLE, None, "accounts_unavailable", soon(1000)),
    (LimitStoreDownError(2.5), 503, UNAVAILABLE, None, "limits_unavailable", soon(2500)),
    (ContextLengthError("long", "messages"), 400, "invalid_request_error", "messages", "context_length_exceeded", {}),
    (InvalidRequestError("bad", "stop"), 400, "invalid_request_error", "stop", None, {}),
    (
        UpstreamRefusedError("not this", "messages", "content_filter"),
        400,
        "invalid_request_error",
        "messages",
        "content_filter",
        {},
    ),
    (UnknownModelError("m"), 404, "invalid_request_error", "model", "model_not_found", {}),
    (UnableError("m"), 400, "invalid_request_error", "model", "unsupported_parameter", {}),
    (ModelStartError(5.0), 503, UNAVAILABLE, None, "model_start_failed", soon(5000)),
    (ModelUnavailableError(0.5), 503, UNAVAILABLE, None, "model_not_ready", soon(500)),
    (OverloadedError(3.0), 503, UNAVAILABLE, None, "server_is_overloaded", soon(3000)),
    (OverloadedError(1e9), 503, UNAVAILABLE, None, "server_is_overloaded", soon(120_000)),
    (QueueFullError("full"), 503, UNAVAILABLE, None, "server_is_overloaded", soon(1000)),
    (DeadlineError("late"), 503, UNAVAILABLE, None, "server_is_overloaded", soon(1000)),
    (ReplicaSilentError("llama", 10.0), 503, UNAVAILABLE, None, None, soon(1000)),
    (ReplicaLostError(), 503, "server_error", None, None, soon(1000)),
    (EngineDeadError("gone"), 503, "server_error", None, None, soon(1000)),
]


@pytest.mark.parametrize(("error", "status", "type", "param", "code", "headers"), TABLE, ids=repr)
def test_every_error_has_its_answer(
    error: Exception, status: int, type: str, param: str | None, code: str | None, headers: dict[str, str]
) -> None:
    told = from_exception(error)
    assert told is not None
    assert (told.status, told.type, told.param, told.code, told.headers) == (status, type, param, code, headers)
    assert orjson.loads(told.body())["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UnknownModelError("gpt\n"), "The model `gpt\\n` does not exist or you do not have access to it."),
        (UnableError("m"), "No pool of the model `m` can do what the request asks for."),
        (ReplicaSilentError("llama", 10.0), "The replica 'llama' did not answer within 10 seconds. Please retry."),
        (UpstreamRefusedError("not this"), "not this"),
        (
            MissingScopeError("admin"),
            "You have insufficient permissions for this operation. Missing scopes: admin. Check that your API key has "
            "the necessary scopes.",
        ),
    ],
    ids=repr,
)
def test_words(error: Exception, message: str) -> None:
    told: Any = from_exception(error)
    assert told.message == message


def test_what_is_an_answer_stays_and_what_nobody_foresaw_has_none() -> None:
    answer = ApiError(418, "teapot")
    assert from_exception(answer) is answer
    assert from_exception(KeyError("x")) is None

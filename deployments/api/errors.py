"""What can go wrong at the edge, and the one shape in which a client hears of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import orjson

from deployments.accounts.errors import BudgetExhaustedError, BudgetHeldError, KeyRefusedError, MissingScopeError
from deployments.accounts.records import DatabaseDownError
from deployments.limits.base import LimitStoreDownError
from deployments.routing.errors import (
    ModelStartError,
    ModelUnavailableError,
    OverloadedError,
    RepeatedLossError,
    ReplicaSilentError,
    RoutingError,
    UnableError,
    UnknownModelError,
    UnusableOutputError,
)
from deployments.upstream.errors import UpstreamRefusedError, UpstreamUnreadError
from engine.errors import ContextLengthError, DeadlineError, EngineError, InvalidRequestError, QueueFullError

INVALID = "invalid_request_error"
SERVER = "server_error"
_UNAVAILABLE = "service_unavailable_error"
_QUEUE_RETRY_S = 1.0
_HELD_RETRY_S = 1.0
_MAX_RETRY_AFTER_S = 120  # official clients do not retry at all when told to wait longer


class ApiError(Exception):
    """An answer that is an error: status, the four fields of the OpenAI envelope, extra headers."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON envelope. All four keys are always there; `code` is a string or null."""
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )


def clip(text: str, limit: int = 100) -> str:
    """A client's own text for use in a message: printable and bounded."""
    shown = text if len(text) <= limit else text[:limit] + "..."
    return shown if shown.isprintable() else ascii(shown)[1:-1]


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request is wrong in itself."""
    return ApiError(400, message, INVALID, param, code)


def unsupported(param: str, message: str, code: str = "unsupported_parameter") -> ApiError:
    """The request is right by the OpenAI API, but asks for what this server does not have."""
    return ApiError(400, message, INVALID, param, code)


def model_not_found(model_id: str) -> ApiError:
    """There is no such model, or not for this client, which must not learn which of both it is."""
    message = f"The model `{clip(model_id)}` does not exist or you do not have access to it."
    return ApiError(404, message, INVALID, "model", "model_not_found")


def url_not_found(method: str, path: str) -> ApiError:
    """No endpoint has this path."""
    return ApiError(404, f"Invalid URL ({clip(method, 20)} {clip(path)})", INVALID)


def method_not_allowed(method: str, path: str, allow: str) -> ApiError:
    """The path has endpoints for other methods: `allow`, separated by commas."""
    message = f"Not allowed to {clip(method, 20)} on {clip(path)}. Allowed: {allow}."
    return ApiError(405, message, INVALID, None, "method_not_supported", {"allow": allow})


def unknown_tier(name: str) -> ApiError:
    """The key names a tier that the configuration no longer has."""
    return ApiError(403, f"The service tier '{clip(name)}' of this API key does not exist here.", INVALID)


def body_too_large(limit: int) -> ApiError:
    """The body has more than `limit` bytes, unpacked."""
    return ApiError(413, f"The request body is too large: at most {limit} bytes are allowed.", INVALID)


def internal() -> ApiError:
    """A fault that nobody foresaw."""
    return ApiError(500, "The server had an error while processing your request. Sorry about that!", SERVER)


def cut_short() -> ApiError:
    """The generation ended on the server's side before its natural end."""
    return _unavailable("The server stopped working on this request before it was complete.", SERVER, None, 1.0)


def _unavailable(message: str, type: str, code: str | None, retry_after_s: float) -> ApiError:
    seconds = min(max(retry_after_s, 0.001), _MAX_RETRY_AFTER_S)
    return ApiError(503, message, type, None, code, retry_after(seconds))


def retry_after(wait_s: float) -> dict[str, str]:
    """The headers that say when to try again, rounded up to milliseconds."""
    ms = math.ceil(round(wait_s * 1000, 3))
    return {"retry-after": str(math.ceil(ms / 1000)), "retry-after-ms": str(ms)}


def from_exception(error: Exception) -> ApiError | None:
    """What the client is told of `error`; None for a fault nobody foresaw (answer internal(), and log it)."""
    match error:
        case ApiError():
            return error
        case KeyRefusedError():
            code = None if error.missing else "invalid_api_key"
            return ApiError(401, str(error), INVALID, None, code, {"www-authenticate": "Bearer"})
        case MissingScopeError():
            text = (
                f"You have insufficient permissions for this operation. Missing scopes: {error.scope}. Check that your "
                "API key has the necessary scopes."
            )
            return ApiError(403, text, INVALID, None, "insufficient_permissions")
        case BudgetExhaustedError():  # no client should retry it by itself, although it may know when to
            headers = {"retry-after": str(math.ceil(error.opens_in_s)), "x-should-retry": "false"}
            return ApiError(429, str(error), "insufficient_quota", None, "insufficient_quota", headers)
        case BudgetHeldError():
            return ApiError(429, str(error), "tokens", None, "rate_limit_exceeded", retry_after(_HELD_RETRY_S))
        case DatabaseDownError():
            text = "The database of accounts can't be reached at the moment. Please retry shortly."
            return _unavailable(text, _UNAVAILABLE, "accounts_unavailable", 1.0)
        case LimitStoreDownError():
            text = "The server cannot check rate limits at the moment. Please retry shortly."
            return _unavailable(text, _UNAVAILABLE, "limits_unavailable", error.retry_after_s)
        case ContextLengthError():
            return invalid(str(error), error.param, "context_length_exceeded")
        case InvalidRequestError():
            return invalid(str(error), error.param)
        case UpstreamRefusedError():
            return invalid(str(error), error.param, error.code)
        case UnknownModelError():
            return model_not_found(error.model_id)
        case UnableError():
            return unsupported("model", str(error))
        case ModelStartError():
            text = "The model can't be started at the moment. Please retry later."
            return _unavailable(text, _UNAVAILABLE, "model_start_failed", error.retry_after_s)
        case ModelUnavailableError():
            text = "The model is not ready to take requests. Please retry shortly."
            return _unavailable(text, _UNAVAILABLE, "model_not_ready", error.retry_after_s)
        case QueueFullError() | OverloadedError() | DeadlineError():
            text = "The server is overloaded. Please retry shortly."
            retry_after_s = error.retry_after_s if isinstance(error, OverloadedError) else _QUEUE_RETRY_S
            return _unavailable(text, _UNAVAILABLE, "server_is_overloaded", retry_after_s)
        case ReplicaSilentError():
            return _unavailable(str(error), _UNAVAILABLE, None, 1.0)
        case RepeatedLossError():
            text = f"{error.replicas} replicas were lost while they worked on this request. It is not tried again."
            return ApiError(500, text, SERVER, None, "replicas_lost", {"x-should-retry": "false"})
        case UpstreamUnreadError():
            return ApiError(502, str(error), SERVER, None, "upstream_answer_not_supported", {"x-should-retry": "false"})
        case UnusableOutputError():
            return ApiError(500, "The model's output for this request is not usable. Sorry about that!", SERVER)
        case RoutingError() | EngineError():
            return cut_short()
    return None

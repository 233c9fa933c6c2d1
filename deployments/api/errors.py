"""What can go wrong at the edge, and the one shape in which a client hears of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import orjson

from engine.errors import ContextLengthError, DeadlineError, EngineError, InvalidRequestError, QueueFullError

INVALID = "invalid_request_error"
SERVER = "server_error"
_QUEUE_RETRY_S = 1.0
_MAX_RETRY_AFTER_S = 120  # official clients do not retry at all when told to wait longer


class ServeError(Exception):
    """Root of what a Backend raises on purpose."""


class ModelUnavailableError(ServeError):
    """No replica of the model can take the request now: loading, restarting or scaled to zero."""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


class ModelStartError(ModelUnavailableError):
    """Replicas of the model fail to start."""


class OverloadedError(ServeError):
    """More requests wait already than this one may wait behind. `retry_after_s`: until there will be fewer."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


class ReplicaLostError(ServeError):
    """The replica that served the request is gone."""


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
    return ApiError(400, message, INVALID, param, code)


def unsupported(param: str, message: str, code: str = "unsupported_parameter") -> ApiError:
    return ApiError(400, message, INVALID, param, code)


def model_not_found(model_id: str) -> ApiError:
    message = f"The model `{clip(model_id)}` does not exist or you do not have access to it."
    return ApiError(404, message, INVALID, "model", "model_not_found")


def url_not_found(method: str, path: str) -> ApiError:
    return ApiError(404, f"Invalid URL ({clip(method, 20)} {clip(path)})", INVALID)


def method_not_allowed(method: str, path: str, allow: str) -> ApiError:
    message = f"Not allowed to {clip(method, 20)} on {clip(path)}. Allowed: {allow}."
    return ApiError(405, message, INVALID, None, "method_not_supported", {"allow": allow})


def unauthorized(message: str, code: str | None = "invalid_api_key") -> ApiError:
    return ApiError(401, message, INVALID, None, code, {"www-authenticate": "Bearer"})


def missing_scope(scope: str) -> ApiError:
    message = (
        f"You have insufficient permissions for this operation. Missing scopes: {scope}. Check that your API key has "
        "the necessary scopes."
    )
    return ApiError(403, message, INVALID, None, "insufficient_permissions")


def unknown_tier(name: str) -> ApiError:
    return ApiError(403, f"The service tier '{clip(name)}' of this API key does not exist here.", INVALID)


def quota_exceeded(message: str, opens_in_s: float) -> ApiError:
    """For what no client should retry by itself, although `retry-after` says when it would succeed."""
    headers = {"retry-after": str(math.ceil(opens_in_s)), "x-should-retry": "false"}
    return ApiError(429, message, "insufficient_quota", None, "insufficient_quota", headers)


def accounts_unavailable() -> ApiError:
    text = "The database of accounts can't be reached at the moment. Please retry shortly."
    return _unavailable(text, "service_unavailable_error", "accounts_unavailable", 1.0)


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is too large: at most {limit} bytes are allowed.", INVALID)


def internal() -> ApiError:
    return ApiError(500, "The server had an error while processing your request. Sorry about that!", SERVER)


def cut_short() -> ApiError:
    """The generation ended on the server's side before its natural end."""
    return _unavailable("The server stopped working on this request before it was complete.", SERVER, None, 1.0)


def replica_silent(pool: str, within_s: float) -> ApiError:
    text = f"A replica of '{pool}' did not answer within {within_s:g} seconds. Please retry."
    return _unavailable(text, "service_unavailable_error", None, 1.0)


def _unavailable(message: str, type: str, code: str | None, retry_after_s: float) -> ApiError:
    seconds = min(max(retry_after_s, 0.001), _MAX_RETRY_AFTER_S)
    headers = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
    return ApiError(503, message, type, None, code, headers)


def from_exception(error: Exception) -> ApiError | None:
    """What the client is told of `error`; None for a fault nobody foresaw (answer internal(), and log it)."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return invalid(str(error), error.param, "context_length_exceeded")
        case InvalidRequestError():
            return invalid(str(error), error.param)
        case ModelStartError():
            text = "The model can't be started at the moment. Please retry later."
            return _unavailable(text, "service_unavailable_error", "model_start_failed", error.retry_after_s)
        case ModelUnavailableError():
            text = "The model is not ready to take requests. Please retry shortly."
            return _unavailable(text, "service_unavailable_error", "model_not_ready", error.retry_after_s)
        case QueueFullError() | OverloadedError() | DeadlineError():
            text = "The server is overloaded. Please retry shortly."
            retry_after_s = error.retry_after_s if isinstance(error, OverloadedError) else _QUEUE_RETRY_S
            return _unavailable(text, "service_unavailable_error", "server_is_overloaded", retry_after_s)
        case ServeError() | EngineError():
            return cut_short()
    return None

"""What an error means for a request: whether another destination may serve it, and what its client is told."""

from __future__ import annotations

from deployments.channel.errors import ReplicaFaultError, StreamLostError
from deployments.config.failures import Failure
from deployments.observe.log import log
from deployments.routing.errors import ModelUnavailableError, OverloadedError, ReplicaLostError
from deployments.upstream.errors import UpstreamBusyError, UpstreamDownError, UpstreamFullError, UpstreamSlowError
from engine.errors import ContextLengthError, EngineDeadError, QueueFullError

RESUMABLE = (StreamLostError, EngineDeadError, ReplicaFaultError)
"""After these errors, another replica can go on with an answer that has begun."""

_BUSY_RETRY_AFTER_S = 1.0  # seconds, for an upstream that is busy and does not say for how long


def failure_of(error: BaseException) -> Failure | None:
    """The kind of failure; the plan says which are tried elsewhere. None: another destination could not do better."""
    match error:
        case (
            StreamLostError() | EngineDeadError() | ReplicaFaultError() | UpstreamDownError() | ModelUnavailableError()
        ):
            return Failure.ERROR
        case QueueFullError() | OverloadedError() | UpstreamBusyError() | UpstreamFullError():
            return Failure.OVERLOADED
        case ContextLengthError():
            return Failure.CONTEXT
        case TimeoutError() | UpstreamSlowError():
            return Failure.TIMEOUT
    return None


def refusal_after(error: Exception, before: Exception) -> Exception:
    """The error for the client after another destination has failed with `error`.

    It is `before`, the error so far, unless the new one tells the client more.
    """
    match error:
        case UpstreamBusyError(retry_after_s=seconds):
            return OverloadedError(seconds if seconds is not None else _BUSY_RETRY_AFTER_S)
        case UpstreamFullError():
            return OverloadedError(_BUSY_RETRY_AFTER_S)
        case QueueFullError() | OverloadedError() | ContextLengthError() | ReplicaFaultError():
            return error
    return before


def final_error(error: Exception, started: bool) -> Exception:
    """The error for the client when no destination is left. `started`: the client has a part of its answer."""
    if started and failure_of(error) is not None:
        log.warning("an answer cannot go on: %s", error)
        return ReplicaLostError()
    return error

"""What an error means for a request: whether another destination may do better, and what its client is told."""

from __future__ import annotations

from deployments.channel.errors import ReplicaFaultError, StreamLostError
from deployments.config.failures import Failure
from deployments.observe.log import log
from deployments.routing.errors import ModelUnavailableError, OverloadedError, ReplicaLostError
from deployments.upstream.errors import UpstreamBusyError, UpstreamDownError, UpstreamFullError, UpstreamSlowError
from engine.errors import ContextLengthError, EngineDeadError, QueueFullError

RESUMABLE = (StreamLostError, EngineDeadError, ReplicaFaultError)
"""After these, another replica can go on with an answer that has begun."""

_BUSY_RETRY_AFTER_S = 1.0  # for a server that is busy and does not say for how long


def failure_of(error: BaseException) -> Failure | None:
    """None: not one that another destination could do better."""
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
    """What the client is told when nobody serves its request: the last destination's reason, unless that says less than
    `before`, the one so far.
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
    """What the client is told of an error that nothing can be done about. `started`: it has a part of its answer."""
    if started and failure_of(error) is not None:
        log.warning("an answer cannot go on: %s", error)
        return ReplicaLostError()
    return error

"""The errors of a channel, and how errors are sent over it."""

from __future__ import annotations

import engine.errors
from engine.errors import EngineError, InvalidRequestError

_DRAINING = "draining"


class StreamLostError(Exception):
    """The replica is gone, is leaving, or cannot be reached. Another replica may serve the request."""


class StreamReturnedError(StreamLostError):
    """The replica is well, but takes no more requests, or hands this one back."""


class ReplicaFaultError(Exception):
    """The replica failed with an unexpected error. Its log has the traceback."""


class DrainingError(Exception):
    """The replica is leaving or drained, and takes no new requests."""


def to_words(error: BaseException) -> tuple[str, str, str | None]:
    """An error as kind, message and the request parameter at fault, if any.

    Of an unexpected error only the class name is sent, since its message may hold internal details.
    """
    if isinstance(error, DrainingError):
        return (_DRAINING, "", None)
    if isinstance(error, EngineError):
        return (type(error).__name__, str(error), getattr(error, "param", None))
    return ("", type(error).__name__, None)


def from_words(kind: str, message: str, param: str | None) -> Exception:
    """The error that to_words() was given; ReplicaFaultError for an error that is not one of the engine."""
    if kind == _DRAINING:
        return StreamReturnedError("the replica takes no more requests")
    cls = getattr(engine.errors, kind, None)
    if not (isinstance(cls, type) and issubclass(cls, EngineError)):
        return ReplicaFaultError(message)
    return cls(message, param) if issubclass(cls, InvalidRequestError) else cls(message)

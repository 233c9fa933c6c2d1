"""What goes wrong on a channel, and the engine's errors as words on the wire."""

from __future__ import annotations

import engine.errors
from engine.errors import EngineError, InvalidRequestError

_DRAINING = "draining"


class StreamLostError(Exception):
    """The replica is gone, is leaving, or cannot be reached. What it had been asked may be asked of another."""


class ReplicaFaultError(Exception):
    """The replica failed in a way nobody foresaw; its log has the traceback."""


class DrainingError(Exception):
    """This replica is leaving, or out of rotation, and takes no more requests."""


def to_words(error: BaseException) -> tuple[str, str, str | None]:
    """Kind, message and, where it has one, the parameter at fault. Nothing of an unforeseen error but its name."""
    if isinstance(error, DrainingError):
        return (_DRAINING, "", None)
    if isinstance(error, EngineError):
        return (type(error).__name__, str(error), getattr(error, "param", None))
    return ("", type(error).__name__, None)


def from_words(kind: str, message: str, param: str | None) -> Exception:
    if kind == _DRAINING:
        return StreamLostError("the replica takes no more requests")
    cls = getattr(engine.errors, kind, None)
    if not (isinstance(cls, type) and issubclass(cls, EngineError)):
        return ReplicaFaultError(message)
    return cls(message, param) if issubclass(cls, InvalidRequestError) else cls(message)

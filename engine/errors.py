"""Everything the engine raises on purpose. User mistakes are ValueErrors that say what is allowed."""

from __future__ import annotations


class EngineError(Exception):
    """Root of the engine's own errors."""


class InvalidRequestError(EngineError, ValueError):
    """The request can never be served as it stands. `param` names the offending field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """Prompt, or prompt plus asked-for output, is longer than the model's context."""


class CapacityError(InvalidRequestError):
    """The request could never fit the KV pool, however long it waited."""


class QueueFullError(EngineError):
    """Too many requests wait already. The request is fine: it may succeed later or elsewhere."""


class DeadlineError(EngineError):
    """The request cannot have its first token by its deadline: refused instead of served too late."""


class ModelFileError(EngineError, ValueError):
    """A model file is missing, truncated, inconsistent or of a kind we do not read. Names file and tensor."""


class ConfigError(EngineError, ValueError):
    """A setting is wrong or two settings exclude each other."""


class EngineDeadError(EngineError):
    """The engine stopped after an internal fault; it takes no more requests."""

"""What an upstream's failure means for the request. ContextLengthError is the engine's own."""

from __future__ import annotations


class UpstreamError(Exception):
    """Root of what an upstream raises on purpose. The text is for our log, not for clients."""


class UpstreamDownError(UpstreamError):
    """It cannot be reached, failed, broke off, or answered what is no answer; also: it does not know our key."""


class UpstreamSlowError(UpstreamError):
    """Nothing has come for as long as it may take."""


class UpstreamBusyError(UpstreamError):
    """It takes no more requests now. `retry_after_s` by its own word, if it said so."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UpstreamFullError(UpstreamError):
    """All the connections that we may have to it are in use. Says nothing of the server's health."""


class UpstreamUnreadError(UpstreamError):
    """Its answer has something that is not passed on here. Says nothing of the server's health. The text is for the
    client."""


class UpstreamRefusedError(UpstreamError):
    """It refuses this request for what it says or how it is put: nobody else is to be asked. The text is for the
    client."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code

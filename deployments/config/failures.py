"""Why an attempt to have a request served can fail in a way that another pool may do better."""

from __future__ import annotations

from enum import StrEnum


class Failure(StrEnum):
    """A request that is wrong in itself, or whose content was refused, is none of these: no other pool is asked."""

    TIMEOUT = "timeout"  # no first token in time
    ERROR = "error"  # the server failed or is gone
    OVERLOADED = "overloaded"  # no room now
    CONTEXT = "context"  # too long for this pool

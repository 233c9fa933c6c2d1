"""Recorded traffic, as `autoscaling.traces.formats` reads it, with this package's error."""

from __future__ import annotations

from pathlib import Path

from autoscaling.traces import formats
from autoscaling.traces.formats import MOONCAKE_BLOCK_TOKENS, Row, TraceError
from load_tests.errors import LoadError

__all__ = ["MOONCAKE_BLOCK_TOKENS", "Row", "read_trace"]


def read_trace(path: Path) -> tuple[Row, ...]:
    """As formats.read_trace. Raises LoadError."""
    try:
        return formats.read_trace(path)
    except TraceError as error:
        raise LoadError(str(error)) from None

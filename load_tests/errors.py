"""The one error of this package."""

from __future__ import annotations


class LoadError(Exception):
    """A test that cannot be run: a bad scenario, trace or endpoint. The message is one line per mistake."""

"""Methods replaced for a while, from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Method = tuple[type, str]
Wrap = Callable[[Method, Callable[..., Any]], Callable[..., Any]]


@contextmanager
def replaced(methods: Sequence[Method], wrap: Wrap) -> Iterator[None]:
    """Within the block each method, which its class must itself define, is wrap(method, original)."""
    originals = [vars(cls)[name] for cls, name in methods]
    try:
        for (cls, name), original in zip(methods, originals, strict=True):
            setattr(cls, name, wrap((cls, name), original))
        yield
    finally:
        for (cls, name), original in zip(methods, originals, strict=True):
            setattr(cls, name, original)

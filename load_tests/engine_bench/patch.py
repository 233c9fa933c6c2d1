"""Methods replaced for a while, from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

Method = tuple[type, str]
Wrap = Callable[[Method, Callable[..., Any]], Callable[..., Any]]


@contextmanager
def replaced(methods: Sequence[Method], wrap: Wrap) -> Iterator[None]:
    """Within the block each method, which its class must itself define, is wrap(method, original)."""
    with ExitStack() as stack:
        for cls, name in methods:
            stack.enter_context(mock.patch.object(cls, name, wrap((cls, name), vars(cls)[name])))
        yield

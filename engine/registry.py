"""Name -> implementation tables. One line per implementation; imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def load(path: str) -> Any:
    """The attribute that `path` names as `module:name`. Raises what importing the module or reading it raises."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


class Registry(Generic[T]):
    """A closed table of lazily imported classes, e.g. ``{"none": "engine.quant.none:Unquantized"}``.

    A literal table rather than decorators: greppable, independent of import order, and an optional
    dependency is imported only when its entry is asked for.
    """

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def names(self) -> tuple[str, ...]:
        """All names, in table order."""
        return tuple(self._entries)

    def get(self, name: str) -> type[T]:
        """The class called `name`. Raises ValueError that lists the known names."""
        try:
            path = self._entries[name]
        except KeyError:
            raise ValueError(f"unknown {self.kind} {name!r}; known: {', '.join(self._entries)}") from None
        cls: type[T] = load(path)
        return cls

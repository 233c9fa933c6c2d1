"""Converts frozen dataclasses to plain tuples, which msgpack can carry, and back according to their annotations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_Convert = Callable[[Any], Any]

_PLAIN = (int, float, str, bool, bytes, NoneType)


def plain(obj: Any) -> tuple[Any, ...]:
    """Returns what msgpack writes for an object that it does not know: a dataclass's values or a set's elements.

    Raises TypeError for any other object.
    """
    if isinstance(obj, frozenset):
        return tuple(obj)
    if is_dataclass(obj) and not isinstance(obj, type):
        values: tuple[Any, ...] = _values(type(obj))(obj)
        return values
    raise TypeError(f"{type(obj).__name__} cannot be sent")


class Decoder(Generic[T]):
    """Makes objects of one dataclass, whose fields are numbers, strings, enums, tuples, frozensets or such dataclasses.

    A field of any other type raises TypeError when the decoder is made, so that nobody adds one unnoticed. `schema`
    describes the fields: two processes with equal schemas understand each other.
    """

    def __init__(self, cls: type[T]) -> None:
        self._cls = cls
        hints = get_type_hints(cls)
        self._names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        converts = [(i, _converter(hints[name], f"{cls.__name__}.{name}")) for i, name in enumerate(self._names)]
        self._converts = [(i, convert) for i, convert in converts if convert is not None]
        self.schema = f"{cls.__name__}{[(name, str(hints[name])) for name in self._names]}"

    def __call__(self, values: tuple[Any, ...]) -> T:
        """Makes an object of its values. Raises ValueError or TypeError for what plain() cannot have given."""
        if len(values) != len(self._names):
            raise ValueError(f"{self._cls.__name__} has {len(self._names)} fields, not {len(values)}")
        converted = list(values)
        for i, convert in self._converts:
            if converted[i] is not None:
                converted[i] = convert(converted[i])
        return self._cls(*converted)


@cache
def _values(cls: type[Any]) -> Callable[[Any], Any]:
    first, *rest = (f.name for f in fields(cls))
    return attrgetter(first, *rest) if rest else lambda obj: (getattr(obj, first),)


def _converter(hint: Any, where: str) -> _Convert | None:
    """The function that makes a `hint` of a value that msgpack has read, other than None.

    Returns None when there is nothing to convert. `where` names the field in the TypeError for other types.
    """
    origin, args = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return None
    if origin in (Union, UnionType):
        kinds = [arg for arg in args if arg is not NoneType]
        if all(kind in _PLAIN for kind in kinds):
            return None
        if len(kinds) == 1:
            return _converter(kinds[0], where)
    elif origin is frozenset and _converter(args[0], where) is None:
        return frozenset
    elif origin is tuple and args[-1] is Ellipsis:
        return _each(_converter(args[0], where))
    elif origin is tuple and all(_converter(arg, where) is None for arg in args):
        return None
    elif isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    elif isinstance(hint, type) and is_dataclass(hint):
        return Decoder(hint)
    raise TypeError(f"{where}: a {hint} cannot be sent")


def _each(convert: _Convert | None) -> _Convert | None:
    if convert is None:
        return None
    return lambda values: tuple([None if value is None else convert(value) for value in values])

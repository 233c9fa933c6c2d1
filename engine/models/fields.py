"""Typed reading of config values: a wrong type is an error, not a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from engine.errors import ModelFileError

Json = Mapping[str, Any]
_MAX_LAYERS = 4096  # twenty times the deepest model
V = TypeVar("V", int, float, bool, str)


def get(values: Json, key: str, kind: type[V], default: V | None = None) -> V:
    """values[key] as `kind`, or `default`; an integer may stand for a float. Raises ModelFileError for another type,
    and when absent or null without a default."""
    value = maybe(values, key, kind)
    if value is None:
        value = default
    if value is None:
        raise ModelFileError(f"key {key!r} is missing")
    return value


def maybe(values: Json, key: str, kind: type[V]) -> V | None:
    """The value of a key, of type `kind`; None where it is absent or null. Raises ModelFileError for another type."""
    value = values.get(key)
    if value is None:
        return None
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ModelFileError(f"key {key!r} must be {kind.__name__}, got {value!r:.80}")
    return kind(value)


def token_ids(values: Json, key: str) -> list[int]:
    """Token ids given as one, several or none."""
    value = values.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int for i in ids):
        raise ModelFileError(f"key {key!r} must be token ids, got {value!r:.80}")
    return ids


def divide(hidden: int, num_heads: int) -> int:
    """The quotient; 0 where it is not a whole number."""
    return hidden // num_heads if num_heads > 0 and hidden % num_heads == 0 else 0


def layer_count(config: Json, key: str) -> int:
    """How many layers a model says it has. Raises ModelFileError for a number that no model has: what is made for each
    layer would take all memory before any tensor is missed."""
    count = get(config, key, int)
    if not 1 <= count <= _MAX_LAYERS:
        raise ModelFileError(f"key {key!r} must be from 1 to {_MAX_LAYERS}, got {count}")
    return count

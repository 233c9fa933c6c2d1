"""Finds what is wrong with a config as data: unknown keys at any depth, and pydantic's findings in plain words."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

Path = tuple[str | int, ...]

_SECRET = frozenset({"api_keys", "api_key", "database", "redis_url"})  # keys whose values no message may show
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "dataclass": "a mapping",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong, and where in the file."""

    path: Path
    message: str

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.message}" if self.path else self.message


def dotted(path: Path) -> str:
    """("models", 0, "name") -> "models[0].name"."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)
    return out


def unknown_keys(value: object, kind: Any, path: Path = ()) -> Iterator[Problem]:
    """Every key of `value` that the type `kind` (pydantic model, dataclass, or containers of them) does not
    declare. Values of the wrong shape are passed over: validation reports those."""
    fields = _fields(kind)
    if fields is not None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if key in fields:
                    yield from unknown_keys(inner, fields[key], (*path, key))
                else:
                    yield Problem((*path, str(key)), unknown(str(key), sorted(fields)))
        return
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from unknown_keys(value, args[0], path)
    elif origin in (Union, types.UnionType):
        yield from unknown_keys(value, _branch(value, args), path)
    elif isinstance(value, list) and args:
        for index, inner in enumerate(value):
            yield from unknown_keys(inner, args[0], (*path, index))
    elif isinstance(value, Mapping) and len(args) == 2:
        for key, inner in value.items():
            yield from unknown_keys(inner, args[1], (*path, key))


def unknown(key: str, known: Sequence[str]) -> str:
    """The message for an unknown key, with the nearest of the known ones."""
    near = get_close_matches(key, known, n=1, cutoff=0.6)
    return "unknown key; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")


def without(value: Any, paths: Collection[Path], at: Path = ()) -> Any:
    """A copy of `value` that lacks the members at `paths`: with unknown keys out of the way, every check runs."""
    if isinstance(value, Mapping):
        return {k: without(v, paths, (*at, k)) for k, v in value.items() if (*at, k) not in paths}
    if isinstance(value, list):
        return [without(v, paths, (*at, i)) for i, v in enumerate(value)]
    return value


def wrong_values(error: ValidationError, prefix: Path = ()) -> Iterator[Problem]:
    """What pydantic found, in plain words. `prefix`: where the validated value stands in the whole."""
    for item in error.errors(include_url=False):
        path, message = _describe(item["type"], item["loc"], item["msg"], item["input"])
        yield Problem((*prefix, *path), message)


def _describe(kind: str, path: Path, message: str, given: object) -> tuple[Path, str]:
    if kind == "missing":
        return path, "is missing"
    if kind in ("value_error", "assertion_error"):
        message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
        # A check of several fields names the field first: "block_size must be ...".
        name, _, rest = message.partition(" ")
        if isinstance(given, Mapping) and name in given:
            return (*path, name), rest
        return path, message
    what = next((text for name, text in _KINDS.items() if kind.startswith(name + "_")), None)
    got = "" if _SECRET.intersection(path) else f", got {given!r}"
    if what and kind.endswith(("_parsing", "_type", "_from_float")):
        return path, f"must be {what}{got}"
    return path, f"{message.removeprefix('Input ').replace('should ', 'must ')}{got}"


def _fields(kind: Any) -> dict[str, Any] | None:
    """Declared keys and their types; None when `kind` is no record."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        by_name = {name: field.annotation for name, field in kind.model_fields.items()}
        return by_name | {f.alias: f.annotation for f in kind.model_fields.values() if f.alias}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return None


def _branch(value: object, options: Sequence[Any]) -> Any:
    """Which member of a union `value` was meant to be: the list, or the record that knows most of its keys, where a
    key whose value names the record (`kind: poisson`) outweighs all others."""
    if isinstance(value, Mapping):
        records = [(fields, o) for o in options if (fields := _fields(o)) is not None]
        return max(records, key=lambda record: _resemblance(value, record[0]), default=(None, None))[1]
    if isinstance(value, list):
        return next((o for o in options if get_origin(o) in (list, tuple, Sequence)), None)
    return None


def _resemblance(value: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[int, int]:
    known = set(value) & set(fields)
    named = [name for name in known if get_origin(fields[name]) is Literal and value[name] in get_args(fields[name])]
    return len(named), len(known)

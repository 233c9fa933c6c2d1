"""The reference of all keys of a Serve config file, made from the types that check the file.

`python -m deployments.config.reference > docs/configuration.md` writes it; a test fails when that file is not current.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, TypeAdapter

from autoscaling.base import POLICIES
from autoscaling.guardrails import GuardrailParams
from deployments.config.application import ServeConfig
from deployments.config.autoscaling import ScalingConfig
from deployments.config.routing import RoutingConfig

_INTRODUCTION = """\
# Configuration

<!-- Made by `python -m deployments.config.reference > docs/configuration.md`: change the types, not this file. -->

A config file is a [Serve config file](https://docs.ray.io/en/latest/serve/production-guide/config.html). This page
describes every key of ours; the others (`http_options`, `logging_config` and so on) are Ray Serve's.

```yaml
proxy_location: HeadOnly
http_options: {host: 127.0.0.1, port: 8000}
applications:
  - name: sluicegate
    route_prefix: /
    import_path: deployments.app:build
    args:                      # ServeConfig
      models:                  # ModelConfig
        - name: my-model
          engine:              # EngineConfig
            model: /models/my-model
      gateway:                 # GatewayConfig
        api_keys: [env:MY_KEY]
    deployments:
      - name: ModelRouter
        user_config: {}        # RoutingConfig
```

`sluice check FILE` names every unknown key, wrong value and missing file. `sluice serve --set KEY=VALUE` changes one
key of the file: a path that begins at the one model (`engine.max_num_seqs`), at `args` (`gateway.api_keys`,
`models.0.name`), or at the file itself (`http.port` is short for `http_options.port`). A key that is given twice is an
error. `null` is a value too: it means what the description says of it, or that the key is not given.
"""


def reference() -> str:
    """The whole page, as Markdown."""
    places: dict[type, list[str]] = {}
    for path, kind in (*sections("args", ServeConfig), *sections("user_config", RoutingConfig)):
        places.setdefault(kind, []).append(path)
    parts = [_INTRODUCTION]
    for kind, paths in places.items():
        parts.append(_section(", ".join(f"`{path}`" for path in paths), kind, places))
        if kind is ScalingConfig:
            parts += _autoscaling_sections(paths[0], places)
    return "\n".join(parts)


def attribute_docs(kind: type) -> dict[str, str]:
    """What stands as a string below each field of a class or of its bases, by the field's name."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not (dataclasses.is_dataclass(base) or issubclass(base, BaseModel)) or base is BaseModel:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                docs[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return docs


def sections(path: str, kind: type) -> Iterator[tuple[str, type]]:
    """The type at `path`, and all that stand below it, depth first."""
    yield path, kind
    for name, annotation in _fields(kind).items():
        for suffix, inner in _records(annotation):
            yield from sections(f"{path}.{name}{suffix}", inner)


def _autoscaling_sections(path: str, places: Mapping[type, list[str]]) -> Iterator[str]:
    yield _section(f"`{path}.guardrails`", GuardrailParams, places)
    for name in POLICIES.names():
        yield _section(f"`{path}.params` with `policy: {name}`", POLICIES.get(name).Params, places)


def _section(title: str, kind: type, places: Mapping[type, list[str]]) -> str:
    docs, schema = attribute_docs(kind), TypeAdapter(kind).json_schema()
    enums = {f"#/$defs/{name}": shared for name, shared in schema.get("$defs", {}).items() if "enum" in shared}
    schema = schema.get("$defs", {}).get(kind.__name__, schema)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, annotation in _fields(kind).items():
        member = schema["properties"][name]
        if (shared := enums.get(member.get("items", {}).get("$ref"))) is not None:
            member = {**member, "items": shared}
        inner = [places[record][0] for _, record in _records(annotation) if record in places]
        meaning = docs.get(name, "")
        meaning += "".join(f" See [{path}](#{_anchor(_title(places, path))})." for path in inner)
        cells = (
            f"`{name}`",
            type_words(member, _bounds(kind, name)),
            _default(member, name in schema.get("required", ())),
            meaning,
        )
        rows.append("| " + " | ".join(cell.strip().replace("|", "\\|") for cell in cells) + " |")
    return f"## {title}\n\n{inspect.getdoc(kind)}\n\n" + "\n".join(rows) + "\n"


def _title(places: Mapping[type, list[str]], path: str) -> str:
    """The heading of the section that describes `path`."""
    return next(", ".join(paths) for paths in places.values() if path in paths)


def _anchor(title: str) -> str:
    """The id that Markdown readers give a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _fields(kind: type) -> dict[str, Any]:
    """The annotation of each field."""
    if issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    assert dataclasses.is_dataclass(kind)
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _records(annotation: Any, suffix: str = "") -> Iterator[tuple[str, type]]:
    """The records inside a type: `[]` leads to a list's members, `.NAME` to a mapping's values."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)):
        yield suffix, annotation
        return
    origin = getattr(annotation, "__origin__", None)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        suffix += ".NAME"
    elif origin in (tuple, list, frozenset):
        suffix += "[]"
    for argument in get_args(annotation):
        yield from _records(argument, suffix)


def type_words(schema: Mapping[str, Any], bounds: Mapping[str, Any] = MappingProxyType({})) -> str:
    """A JSON schema in words, with `bounds` in addition."""
    schema = {**schema, **bounds}
    if "anyOf" in schema:
        return " or ".join(type_words(option, bounds) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    match schema.get("type"):
        case "array":
            return f"list of {type_words(schema.get('items', {}))}"
        case "object" if isinstance(schema.get("additionalProperties"), Mapping):
            return f"mapping to {type_words(schema['additionalProperties'])}"
        case "object":
            return "mapping"
        case "null":
            return "null"
    words = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}
    word = words.get(schema.get("type", ""), "mapping" if "$ref" in schema or "allOf" in schema else "any")
    low, high = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    if low is not None and high is not None:
        return f"{word}, {low:g} to {high:g}"
    limits = [f"at least {low:g}"] if low is not None else [f"above {above:g}"] if above is not None else []
    limits += [f"at most {high:g}"] if high is not None else []
    if word == "text" and "maxLength" in schema:
        limits.append(f"at most {schema['maxLength']} characters")
    return ", ".join([word, *limits])


def _bounds(kind: type, name: str) -> dict[str, Any]:
    """What a dataclass says in its field's metadata: `low` and `high` are allowed values, `above` is not."""
    if not dataclasses.is_dataclass(kind):
        return {}
    metadata = next(field.metadata for field in dataclasses.fields(kind) if field.name == name)
    named = {"minimum": "low", "maximum": "high", "exclusiveMinimum": "above", "enum": "choices"}
    return {key: metadata[own] for key, own in named.items() if metadata.get(own) is not None}


def _default(schema: Mapping[str, Any], required: bool) -> str:
    value = schema.get("default", [])  # a default that is made anew for each object is an empty list or mapping
    if required:
        return "required"
    if "$ref" in schema:
        return "its defaults"
    if isinstance(value, list | dict) and not value:
        return "none"
    if schema.get("uniqueItems"):
        value = sorted(value)
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value)}`"


if __name__ == "__main__":
    print(reference(), end="")

"""JSON Schema of the fields that are read by hand (messages.py, options.py, prompts.py), for the API's description, and
for finding members that nobody knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_STRING: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_NULL: Schema = {"type": "null"}


def _record(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _array(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL]}


def _any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


_NAME = _or_null({"type": "string", "pattern": r"^[^\s<|\\/>]+$", "maxLength": 64})
_TEXT_PART = _record(("type", "text"), type={"const": "text"}, text=_STRING)
_REFUSAL_PART = _record(("type", "refusal"), type={"const": "refusal"}, refusal=_STRING)
_TEXT = _any_of(_STRING, _array(_TEXT_PART, minItems=1))
_SAID = _any_of(_STRING, _array(_any_of(_TEXT_PART, _REFUSAL_PART), minItems=1))
_CALLED = _record(
    ("name", "arguments"),
    name=_STRING,
    arguments={"type": "string", "description": "The JSON of an object, or empty."},
)
_TOOL_CALL = _record(("id", "type", "function"), id=_STRING, type={"const": "function"}, function=_CALLED)
_CALLS = _array(_TOOL_CALL, minItems=1)
_UNSUPPORTED: Schema = {"type": "null", "description": "Not supported."}


def _assistant(content: Schema, *required: str, **more: Schema) -> Schema:
    return _record(
        ("role", *required),
        role={"const": "assistant"},
        content=content,
        name=_NAME,
        annotations={},
        audio=_UNSUPPORTED,
        function_call=_UNSUPPORTED,
        **more,
    )


MESSAGES = _array(
    _any_of(
        _record(
            ("role", "content"),
            role={"enum": ["system", "developer", "user"]},
            content=_TEXT,
            name=_NAME,
        ),
        _assistant(_SAID, "content", refusal=_or_null(_STRING), tool_calls=_or_null(_array(_TOOL_CALL))),
        _assistant(_NULL, "tool_calls", refusal=_or_null(_STRING), tool_calls=_CALLS),
        _assistant(_NULL, "refusal", refusal=_STRING, tool_calls=_NULL),
        _record(
            ("role", "content", "tool_call_id"),
            role={"const": "tool"},
            content=_TEXT,
            name=_NAME,
            tool_call_id={"type": "string", "description": "The id of a call in a message before this one."},
        ),
    ),
    minItems=1,
)
TOOLS = _or_null(
    _array(
        _record(
            ("type", "function"),
            type={"const": "function"},
            function=_record(
                ("name",),
                name={"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                description=_or_null(_STRING),
                parameters=_or_null(_OBJECT),
                strict={"enum": [False, None]},
            ),
        ),
        maxItems=128,
    )
)
TOOL_CHOICE: Schema = {"enum": ["none", "auto", None], "description": "Only together with tools."}
RESPONSE_FORMAT = _or_null(_record(("type",), type={"const": "text"}))
MODALITIES = _or_null(_array({"const": "text"}, minItems=1, maxItems=1))
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": 1024}
STOP = _any_of(_STOP, _array(_STOP, maxItems=4), _NULL)
UNSUPPORTED = _UNSUPPORTED
SERVICE_TIER = {"enum": ["auto", "default", None], "description": "Or the name of the key's own tier."}
_IDS = _array({"type": "integer", "minimum": 0}, minItems=1)
_PROMPT: Schema = {"type": "string", "minLength": 1}
PROMPT = _any_of(_PROMPT, _array(_PROMPT, minItems=1), _IDS, _array(_IDS, minItems=1))
LOGIT_BIAS: Schema = {"propertyNames": {"pattern": "^[0-9]{1,10}$"}, "description": "By token id, in decimal."}


def unknown_members(value: Any, schema: Schema, at: str) -> Iterator[str]:
    """Where in `value` there are members of objects that `schema` does not name. What has no shape of the schema's is
    passed over: reading it says what is wrong with it."""
    if options := schema.get("anyOf"):
        schema = next((option for option in options if _meant(value, option)), {})
    if isinstance(value, dict) and (properties := schema.get("properties")):
        for key, inner in value.items():
            if key in properties:
                yield from unknown_members(inner, properties[key], f"{at}.{key}")
            else:
                yield f"{at}.{key}"
    elif isinstance(value, list) and "items" in schema:
        for i, inner in enumerate(value):
            yield from unknown_members(inner, schema["items"], f"{at}[{i}]")


def _meant(value: Any, schema: Schema) -> bool:
    """Whether `value` is of the kind that `schema` describes, by its type and by what tells records apart."""
    if isinstance(value, list):
        return schema.get("type") == "array"
    if not isinstance(value, dict) or schema.get("type") != "object":
        return False
    for key in ("role", "type"):
        told = schema.get("properties", {}).get(key, {})
        allowed = [told["const"]] if "const" in told else told.get("enum")
        if allowed is not None and value.get(key) not in allowed:
            return False
    return True

"""Validation failures in OpenAI's words: which parameter, what was given, what is allowed, which code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from deployments.api.errors import ApiError, clip, invalid

_KEY_OF_OBJECT = "[key]"  # pydantic's last path part when the key, not the value, is at fault
_EXPECTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "float_type": "a decimal",
    "bool_type": "a boolean",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_BOUNDS = {"greater_than_equal": (">=", "ge"), "greater_than": (">", "gt"), "less_than_equal": ("<=", "le")}
_LENGTHS = {
    "string_too_short": ("string_below_min_length", "string too short", "minimum", "min_length"),
    "string_too_long": ("string_above_max_length", "string too long", "maximum", "max_length"),
    "too_short": ("array_below_min_length", "array too short", "minimum", "min_length"),
}


def path(loc: Sequence[int | str]) -> str:
    """`messages[0].role` from ("messages", 0, "role"). Parts may be a client's own keys: they are clipped."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part != _KEY_OF_OBJECT:
            text += f".{clip(part, 64)}" if text else clip(part, 64)
    return text


def kind(value: object) -> str:
    """A JSON value's kind, as the end of "but got ... instead"."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a decimal"
        case str():
            return "a string"
        case list():
            return "an array"
        case dict():
            return "an object"
    return "an unknown value"


def wrong_type(param: str, expected: str, value: object) -> ApiError:
    """`expected` as `a string`."""
    message = f"Invalid type for '{param}': expected {expected}, but got {kind(value)} instead."
    return invalid(message, param, "invalid_type")


def missing(param: str) -> ApiError:
    """A required parameter is not there."""
    return invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")


def out_of_range(param: str, value: float, bound: float, op: str) -> ApiError:
    """`op`: the relation that had to hold, one of >=, >, <=, <. An integer `bound` makes it an integer's error."""
    number = "decimal" if isinstance(bound, float) else "integer"
    code, words = ("below_min", "below minimum") if op.startswith(">") else ("above_max", "above maximum")
    limit = f"{op} {bound:.16g}" if isinstance(bound, float) else f"{op} {bound}"
    message = f"Invalid '{param}': {number} {words} value. Expected a value {limit}, but got {_number(value)} instead."
    return invalid(message, param, f"{number}_{code}_value")


def unsupported_choice(param: str, value: str, allowed: Sequence[str]) -> ApiError:
    """`value` is none of the words that the parameter may have."""
    names = ", ".join(f"'{name}'" for name in allowed)
    return invalid(f"Invalid value: '{clip(value)}'. Supported values are: {names}.", param, "invalid_value")


def from_pydantic(error: ValidationError) -> ApiError:
    """The first of the failures. No word of the validation library gets through."""
    details = error.errors(include_url=False)[0]
    param = path(details["loc"])
    code = details["type"]
    ctx = details.get("ctx", {})
    if code == "missing":
        return missing(param)
    if code in _EXPECTED:
        return wrong_type(param, _EXPECTED[code], details["input"])
    if code in _BOUNDS:
        op, key = _BOUNDS[code]
        return out_of_range(param, details["input"], ctx[key], op)
    if code == "too_long":
        return too_many_members(param, details["input"], ctx["max_length"])
    if code in _LENGTHS:
        return _length(param, details, *_LENGTHS[code])
    if code == "literal_error" and isinstance(details["input"], str):
        message = f"Invalid value: '{clip(details['input'])}'. Supported values are: {ctx['expected']}."
        return invalid(message, param, "invalid_value")
    if code == "literal_error":
        return wrong_type(param, "a string", details["input"])
    return invalid(f"Invalid value for '{param}'.", param, "invalid_value")


def too_many_members(param: str, given: Sequence[object] | Mapping[str, object], limit: int) -> ApiError:
    """An array or object is longer than `limit`."""
    if isinstance(given, Mapping):
        code, what = "object_above_max_properties", "object with too many properties"
    else:
        code, what = "array_above_max_length", "array too long"
    message = f"Invalid '{param}': {what}. Expected maximum length {limit}, but got length {len(given)} instead."
    return invalid(message, param, code)


def _length(param: str, details: ErrorDetails, code: str, what: str, side: str, key: str) -> ApiError:
    limit = details["ctx"][key]
    given = details["input"]
    message = f"Invalid '{param}': {what}. Expected {side} length {limit}, but got length {len(given)} instead."
    return invalid(message, param, code)


def _number(value: float) -> str:
    return clip(f"{value:.16g}" if isinstance(value, float) else str(value), 40)

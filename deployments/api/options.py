"""Fields whose shape varies: stop, logit_bias, tools, response_format and the choices we cannot honour yet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deployments.api.errors import clip, invalid, unsupported
from deployments.api.request_types import ChatBody, CompletionBody
from deployments.api.validation_errors import kind, missing, out_of_range, unsupported_choice, wrong_type

_MAX_STOPS = 4
_MAX_STOP_CHARS = 1024
_MAX_TOOLS = 128
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def stops(value: Any) -> tuple[str, ...]:
    """`stop` as strings: null, one string, or up to four, none of them empty."""
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise wrong_type("stop", "a string or an array of strings", value)
    if len(items) > _MAX_STOPS:
        message = (
            f"Invalid 'stop': array too long. Expected an array with maximum length {_MAX_STOPS}, "
            f"but got an array with length {len(items)} instead."
        )
        raise invalid(message, "stop", "array_above_max_length")
    for i, item in enumerate(items):
        param = "stop" if isinstance(value, str) else f"stop[{i}]"
        if not isinstance(item, str):
            raise wrong_type(param, "a string", item)
        if not item:
            raise invalid(f"Invalid '{param}': a stop string may not be empty.", param, "invalid_value")
        if len(item) > _MAX_STOP_CHARS:
            message = f"Invalid '{param}': string too long. Expected at most {_MAX_STOP_CHARS} characters."
            raise invalid(message, param, "string_above_max_length")
    return tuple(dict.fromkeys(items))


def logit_biases(value: Mapping[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Keys are token ids written as decimal strings."""
    biases = []
    for key, bias in (value or {}).items():
        if not re.fullmatch(r"[0-9]{1,10}", key) or int(key) >= vocab_size:
            message = f"Invalid key in 'logit_bias': '{clip(key, 40)}'. Expected a token id from 0 to {vocab_size - 1}."
            raise invalid(message, "logit_bias", "invalid_value")
        biases.append((int(key), float(bias)))
    return tuple(biases)


def token_ids(param: str, ids: list[int], vocab_size: int) -> frozenset[int]:
    """`ids` if all are tokens of the vocabulary. Raises ApiError 400."""
    for i, token_id in enumerate(ids):
        check_token_id(f"{param}[{i}]", token_id, vocab_size)
    return frozenset(ids)


def check_token_id(param: str, token_id: int, vocab_size: int) -> None:
    """Raises ApiError 400 for what is no token of the vocabulary."""
    if token_id < 0:
        raise out_of_range(param, token_id, 0, ">=")
    if token_id >= vocab_size:
        raise out_of_range(param, token_id, vocab_size - 1, "<=")


def refuse_unsupported_chat(body: ChatBody) -> None:
    """Raises for what would change the answer if it were ignored."""
    for name in ("audio", "web_search_options", "functions", "function_call", "reasoning_effort"):
        if getattr(body, name) is not None:
            raise unsupported(name, f"Unsupported parameter: '{name}' is not supported with this model.")
    if body.modalities is not None and body.modalities != ["text"]:
        raise unsupported("modalities", "Unsupported value: 'modalities' may only be ['text'].", "unsupported_value")
    _refuse_structured(body.response_format)


def refuse_unsupported_completion(body: CompletionBody) -> None:
    """As refuse_unsupported_chat()."""
    if body.suffix:
        raise unsupported("suffix", "Unsupported parameter: 'suffix' is not supported with this model.")
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        message = f"Unsupported value: 'best_of' may only be equal to 'n' ({n}), but got {body.best_of}."
        raise unsupported("best_of", message, "unsupported_value")


def _refuse_structured(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, dict):
        raise wrong_type("response_format", "an object", value)
    if "type" not in value:
        raise missing("response_format.type")
    match value["type"]:
        case "text":
            return
        case "json_object" | "json_schema" as name:
            message = f"Unsupported value: 'response_format.type' '{name}' is not supported yet. Use 'text'."
            raise unsupported("response_format.type", message, "unsupported_value")
        case str(name):
            raise unsupported_choice("response_format.type", name, ("text", "json_object", "json_schema"))
        case other:
            raise wrong_type("response_format.type", "a string", other)


def tools(body_tools: Any, choice: Any) -> list[dict[str, Any]] | None:
    """The tools that the template is to show, or None. Output is not parsed into calls yet, so a call cannot be
    promised: tool_choice `required` or a named function is refused."""
    known = [_tool(i, tool) for i, tool in enumerate(_tool_list(body_tools))]
    match choice:
        case None:
            return known or None
        case "none" | "auto":
            if body_tools is None:
                raise invalid("'tool_choice' is only allowed when 'tools' are specified.", "tool_choice")
            return known or None if choice == "auto" else None
        case "required" | {"type": "function" | "allowed_tools" | "custom"}:
            message = "Unsupported value: 'tool_choice' may only be 'none' or 'auto' with this model."
            raise unsupported("tool_choice", message, "unsupported_value")
        case str():
            raise unsupported_choice("tool_choice", choice, ("none", "auto", "required"))
        case dict():
            at = "tool_choice.type"
            raise invalid(f"Invalid value for '{at}': expected 'function'.", at, "invalid_value")
    raise wrong_type("tool_choice", "a string or an object", choice)


def _tool_list(value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type("tools", "an array of objects", value)
    if len(value) > _MAX_TOOLS:
        message = f"Invalid 'tools': array too long. Expected at most {_MAX_TOOLS} tools, but got {len(value)}."
        raise invalid(message, "tools", "array_above_max_length")
    return value


def _tool(i: int, tool: Any) -> dict[str, Any]:
    at = f"tools[{i}]"
    if not isinstance(tool, dict):
        raise wrong_type(at, "an object", tool)
    if "type" not in tool:
        raise missing(f"{at}.type")
    if tool["type"] != "function":
        given = tool["type"] if isinstance(tool["type"], str) else kind(tool["type"])
        raise unsupported_choice(f"{at}.type", given, ("function",))
    function = tool.get("function")
    if function is None:
        raise missing(f"{at}.function")
    if not isinstance(function, dict):
        raise wrong_type(f"{at}.function", "an object", function)
    name = function.get("name")
    if name is None:
        raise missing(f"{at}.function.name")
    if not isinstance(name, str):
        raise wrong_type(f"{at}.function.name", "a string", name)
    if not _TOOL_NAME.fullmatch(name):
        message = f"Invalid '{at}.function.name': expected 1 to 64 letters, digits, underscores or dashes."
        raise invalid(message, f"{at}.function.name", "invalid_value")
    for key, types, expected in _FUNCTION_FIELDS:
        if function.get(key) is not None and not isinstance(function[key], types):
            raise wrong_type(f"{at}.function.{key}", expected, function[key])
    if function.get("strict"):
        message = f"Unsupported value: '{at}.function.strict' may not be true: arguments are not held to their schema."
        raise unsupported(f"{at}.function.strict", message, "unsupported_value")
    return tool


_FUNCTION_FIELDS: tuple[tuple[str, type, str], ...] = (
    ("description", str, "a string"),
    ("parameters", dict, "an object"),
    ("strict", bool, "a boolean"),
)

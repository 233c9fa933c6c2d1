"""Chat messages: from what clients send to what a template can render.

Out comes a list of plain dicts with only the fields a template may see and a `content` that is always a string: text
parts are joined with a newline, an assistant turn that only calls tools has "", `developer` is `system`. Every error
names the message by its index.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from deployments.api.body import MAX_DEPTH, too_deep
from deployments.api.errors import invalid, unsupported
from deployments.api.validation_errors import kind, missing, unsupported_choice, wrong_type

_NAME = re.compile(r"[^\s<|\\/>]+")
_MAX_NAME = 64
_ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]


def read_messages(value: Any) -> list[Message]:
    """Raises ApiError 400."""
    if value is None:
        raise missing("messages")
    if not isinstance(value, list):
        raise wrong_type("messages", "an array of objects", value)
    if not value:
        text = "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty one instead."
        raise invalid(text, "messages", "empty_array")
    messages: list[Message] = []
    calls: set[str] = set()
    for i, item in enumerate(value):
        messages.append(_message(f"messages[{i}]", item, calls))
    return messages


def _message(at: str, item: Any, calls: set[str]) -> Message:
    """`calls` collects the ids of the tool calls seen so far."""
    if not isinstance(item, dict):
        raise wrong_type(at, "an object", item)
    role = item.get("role")
    if role is None:
        raise missing(f"{at}.role")
    if not isinstance(role, str):
        raise wrong_type(f"{at}.role", "a string", role)
    if role not in _ROLES:
        raise unsupported_choice(f"{at}.role", role, _ROLES)
    message: Message = {"role": "system" if role == "developer" else role}
    if item.get("name") is not None:
        message["name"] = _name(f"{at}.name", item["name"])
    if role == "assistant":
        return _assistant(at, item, message, calls)
    if item.get("content") is None:
        raise missing(f"{at}.content") if "content" not in item else wrong_type(f"{at}.content", _TEXT, None)
    message["content"] = _text(f"{at}.content", item["content"])
    if role == "tool":
        message["tool_call_id"] = _answered_call(at, item, calls)
    return message


def _assistant(at: str, item: dict[str, Any], message: Message, calls: set[str]) -> Message:
    for key in ("audio", "function_call"):
        if item.get(key) is not None:
            raise unsupported(f"{at}.{key}", f"Unsupported parameter: '{at}.{key}' is not supported with this model.")
    tool_calls = item.get("tool_calls")
    refused = None if item.get("refusal") is None else _string(f"{at}.refusal", item["refusal"])
    if item.get("content") is not None:
        message["content"] = _text(f"{at}.content", item["content"], refusals=True)
    elif tool_calls:
        message["content"] = ""
    elif refused is not None:
        message["content"] = refused
    else:
        raise missing(f"{at}.content") if "content" not in item else wrong_type(f"{at}.content", _TEXT, None)
    if tool_calls is not None:
        if not isinstance(tool_calls, list):
            raise wrong_type(f"{at}.tool_calls", "an array of objects", tool_calls)
        read = [_tool_call(f"{at}.tool_calls[{j}]", call) for j, call in enumerate(tool_calls)]
        calls.update(call["id"] for call in read)
        if read:
            message["tool_calls"] = read
    return message


def _tool_call(at: str, call: Any) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise wrong_type(at, "an object", call)
    call_type = call.get("type")
    if call_type is None:
        raise missing(f"{at}.type")
    if call_type != "function":
        given = call_type if isinstance(call_type, str) else kind(call_type)
        raise unsupported_choice(f"{at}.type", given, ("function",))
    function = call.get("function")
    if not isinstance(function, dict):
        raise missing(f"{at}.function") if function is None else wrong_type(f"{at}.function", "an object", function)
    name = _required_string(f"{at}.function", function, "name")
    arguments = _required_string(f"{at}.function", function, "arguments")
    _check_arguments(f"{at}.function.arguments", arguments)
    call_id = _required_string(at, call, "id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _check_arguments(at: str, text: str) -> None:
    """Templates render arguments as an object; "" is what some clients send for a call without any."""
    if not text:
        return
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise invalid(f"Invalid '{at}': the string is not valid JSON.", at, "invalid_value") from None
    if too_deep(value):
        raise invalid(f"Invalid '{at}': more than {MAX_DEPTH} levels of nesting.", at, "invalid_value")
    if not isinstance(value, dict):
        message = f"Invalid '{at}': expected the JSON of an object, but got that of {kind(value)} instead."
        raise invalid(message, at, "invalid_value")


def _answered_call(at: str, item: dict[str, Any], calls: set[str]) -> str:
    call_id = _required_string(at, item, "tool_call_id")
    if call_id not in calls:
        message = (
            f"Invalid parameter: '{at}' with role 'tool' must be a response to a preceding message with 'tool_calls' "
            "that has its 'tool_call_id'."
        )
        raise invalid(message, f"{at}.tool_call_id", "invalid_value")
    return call_id


_TEXT = "a string or an array of content parts"


def _text(at: str, content: Any, refusals: bool = False) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(at, _TEXT, content)
    if not content:
        raise invalid(f"Invalid '{at}': empty array. Expected at least one content part.", at, "empty_array")
    return "\n".join(_part(f"{at}[{j}]", part, refusals) for j, part in enumerate(content))


def _part(at: str, part: Any, refusals: bool) -> str:
    if not isinstance(part, dict):
        raise wrong_type(at, "an object", part)
    match part.get("type"):
        case None:
            raise missing(f"{at}.type")
        case "text":
            return _required_string(at, part, "text")
        case "refusal" if refusals:
            return _required_string(at, part, "refusal")
        case "image_url" | "input_audio" | "file" | "video_url" | "audio_url" as name:
            message = f"Invalid content type '{name}' in '{at}': this model takes text only."
            raise unsupported(f"{at}.type", message, "unsupported_value")
        case str(name):
            raise unsupported_choice(f"{at}.type", name, ("text",))
        case other:
            raise wrong_type(f"{at}.type", "a string", other)


def _name(at: str, value: Any) -> str:
    """No spaces and nothing of a template's own markup: templates put names next to roles."""
    name = _string(at, value)
    if len(name) > _MAX_NAME:
        message = f"Invalid '{at}': string too long. Expected maximum length {_MAX_NAME}, but got length {len(name)}."
        raise invalid(message, at, "string_above_max_length")
    if not _NAME.fullmatch(name):
        message = f"Invalid '{at}': string does not match pattern. Expected a string that matches '^{_NAME.pattern}$'."
        raise invalid(message, at, "invalid_value")
    return name


def _required_string(at: str, item: dict[str, Any], key: str) -> str:
    if item.get(key) is None:
        raise missing(f"{at}.{key}")
    return _string(f"{at}.{key}", item[key])


def _string(at: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_type(at, "a string", value)
    return value

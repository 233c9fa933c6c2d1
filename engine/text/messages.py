"""OpenAI-style messages in the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """What a chat template reads. `tool_calls`: an assistant's calls. `null_content`: it asks whether content is none,
    which the content of a turn with calls only then is; else that is "". `text_arguments`: it wants a call's arguments
    as the JSON text that they are in the API, not as an object."""

    tool_calls: bool = True
    null_content: bool = False
    text_arguments: bool = False


def for_template(messages: Sequence[Mapping[str, Any]], form: TemplateForm) -> list[dict[str, Any]]:
    """Copies with string content, roles that templates know, and tool-call arguments in the template's form.

    Text parts are joined with a newline. "developer" becomes "system". For a template that does not know tool calls
    they are written into the content as JSON, one per line, so that the turn is not lost. Raises InvalidRequestError
    naming the message.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", "messages")
    return [_message(message, f"messages[{i}]", form) for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str, form: TemplateForm) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", "messages")
    out = {k: v for k, v in message.items() if v is not None}
    given = [(call, f"{where}.tool_calls[{j}]") for j, call in enumerate(out.pop("tool_calls", []))]
    calls = [_call(call, at, form.tool_calls and form.text_arguments) for call, at in given]
    content: str | None = _content(message.get("content"), where, optional=role == "assistant" and bool(calls))
    if calls and not form.tool_calls:
        lines = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
        content = "\n".join([content, *lines] if content else lines)
    elif calls:
        out["tool_calls"] = calls
        if form.null_content and message.get("content") is None:
            content = None
    return {**out, "role": "system" if role == "developer" else role, "content": content}


def _content(content: Any, where: str, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"{where}.content must be a string or a list of text parts", "messages")
    return "\n".join(_part(part, f"{where}.content[{j}]") for j, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise InvalidRequestError(f"{where}: only parts of type 'text' are supported, got {kind!r}", "messages")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.text must be a string", "messages")
    return text


def _call(call: Any, where: str, as_text: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where}.function must have a name and arguments", "messages")
    arguments = function.get("arguments")
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidRequestError(f"{where}.function.arguments must be a string holding a JSON object", "messages")
    return {**call, "function": {**function, "arguments": (arguments or "{}") if as_text else parsed}}

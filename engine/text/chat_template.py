"""Messages to prompt ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta

from engine.errors import InvalidRequestError, ModelFileError
from engine.text.guard import Disguise, SpecialTokenGuard
from engine.text.jinja_env import make_environment
from engine.text.messages import TemplateForm, for_template
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import OTHER_NAMES

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", *OTHER_NAMES})
_ASKS_FOR_NONE = re.compile(r"""content(?:'\]|"\])?\s*(?:is\s+(?:not\s+)?none|[!=]=\s*none)\b""", re.IGNORECASE)
_PROBE = "sluicegate_probe"  # a name that no template writes by itself


class ChatTemplate:
    """A model's chat template, compiled once; threads may share it. `tool_source`: another one for requests with tools.

    `supports_tools`: a template reads `tools`; others ignore them. Control tokens, BOS included, are exactly
    those that the template writes. Messages, tools and template_kwargs can't add any, whatever they spell.
    Raises ModelFileError if the template does not compile.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        tool_source: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        env = make_environment(now)
        self._tokens = tokenizer.named_tokens
        self._usual = _Compiled(env, source, self._tokens)
        self._for_tools = self._usual if tool_source is None else _Compiled(env, tool_source, self._tokens)
        self.supports_tools = self._for_tools.reads_tools
        self._guard = SpecialTokenGuard(tokenizer)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Prompt ids. See messages.for_template for what becomes of the messages.

        `continue_final_message`: the prompt ends with the last assistant message's text, its turn left open; needs
        add_generation_prompt False. `template_kwargs` are further template variables. Raises InvalidRequestError,
        also with the template's own message when the template refuses the conversation.
        """
        disguise, text = self._render(messages, tools, add_generation_prompt, continue_final_message, template_kwargs)
        return disguise.encode(text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. Encoding it again differs from encode() where messages spell control tokens."""
        disguise, text = self._render(messages, tools, add_generation_prompt, continue_final_message, template_kwargs)
        return disguise.reveal(text)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> tuple[Disguise, str]:
        """The prompt with control tokens of the messages disguised, and the key to it."""
        if taken := sorted(_RESERVED & set(template_kwargs or ())):
            raise InvalidRequestError(f"chat_template_kwargs may not set {taken[0]!r}", "chat_template_kwargs")
        template = self._for_tools if tools else self._usual
        disguise = self._guard.for_call()
        turns = [
            # The role is one of a closed list, and templates build control tokens from it: never disguised.
            {**disguise.hide(turn, whole=True), "role": turn["role"]}
            for turn in for_template(messages, template.form)
        ]
        if continue_final_message:
            _leave_open(turns, add_generation_prompt, disguise.end_mark)
        variables = {
            **disguise.hide(template_kwargs or {}, whole=False),
            "messages": turns,
            "tools": disguise.hide(tools, whole=False) if tools else None,  # templates test `is not none`
            "add_generation_prompt": add_generation_prompt,
            **self._tokens,
        }
        try:
            text = template.render(variables)
        except Exception as e:  # a template can fail in any way, over what the request gave it
            raise InvalidRequestError(f"chat template: {disguise.reveal(str(e))}", "messages") from e
        if continue_final_message:
            text, mark, _ = text.rpartition(disguise.end_mark)
            if not mark:
                raise InvalidRequestError("the chat template leaves out the last message's text", "messages")
        return disguise, text


class _Compiled:
    """One template, and what it reads."""

    def __init__(self, env: jinja2.Environment, source: str, tokens: Mapping[str, str]) -> None:
        """Raises ModelFileError."""
        try:
            self._template = env.from_string(source)
            names = meta.find_undeclared_variables(env.parse(source))
        except jinja2.TemplateError as e:
            raise ModelFileError(f"chat template does not compile: {e}") from e
        self.reads_tools = "tools" in names
        self._tokens = tokens
        null_content = _ASKS_FOR_NONE.search(source) is not None
        self.form = TemplateForm("tool_calls" in source, null_content, False)
        if self.form.tool_calls and not self._writes({_PROBE: 7}) and self._writes(json.dumps({_PROBE: 7})):
            self.form = replace(self.form, text_arguments=True)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises whatever the template raises."""
        text: str = self._template.render(variables)
        return text

    def _writes(self, arguments: Any) -> bool:
        """Whether a call with these arguments comes out as JSON."""
        function = {"name": "f", "arguments": arguments}
        content = None if self.form.null_content else ""
        turns = [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": content,
                "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
            },
            {"role": "tool", "content": "b", "tool_call_id": "call_1", "name": "f"},
        ]
        try:
            text = self.render({**self._tokens, "messages": turns, "tools": None, "add_generation_prompt": False})
        except Exception:  # a template can fail in any way
            return False
        return f'"{_PROBE}"' in text


def _leave_open(turns: list[dict[str, Any]], add_generation_prompt: bool, end_mark: str) -> None:
    """Mark where the last turn's text ends, for the rendered text to be cut there."""
    if add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message needs add_generation_prompt to be false", "continue_final_message"
        )
    if turns[-1]["role"] != "assistant" or "tool_calls" in turns[-1]:
        raise InvalidRequestError(
            "continue_final_message needs a last message of role 'assistant' without tool calls", "messages"
        )
    turns[-1]["content"] += end_mark

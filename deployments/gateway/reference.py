"""The reference of the HTTP API, made from the types that bodies are validated with.

`python -m deployments.gateway.reference > docs/api.md` writes it; a test fails when that file is not current, or when a
parameter is not in PARAMETERS.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from deployments.admin.pools import POOL_OPERATIONS
from deployments.admin.routes import ADMIN_OPERATIONS
from deployments.api.openapi import OPERATIONS, Operation, document
from deployments.api.request_types import CHANGING_FIELDS, ChatBody, CompletionBody, EmbeddingsBody, TokenizeBody
from deployments.config.reference import type_words

BODIES = (ChatBody, CompletionBody, TokenizeBody, EmbeddingsBody)
_IGNORED = "Accepted without effect."
_REFUSED = "Refused with status 400."
PARAMETERS: Mapping[str, str] = {
    "model": "The model id, one of GET /v1/models.",
    "messages": "The conversation, in OpenAI's roles. Text parts only: images, audio and files are refused.",
    "prompt": "A string, token ids, or a list of either.",
    "stream": "Whether the answer comes as server-sent events.",
    "stream_options": "`include_usage` adds a last chunk with the usage. `include_obfuscation` has no effect.",
    "n": "How many choices there are for each prompt.",
    "temperature": "0 is greedy. By default the model's own (`generation_config.json`), else 1.",
    "top_p": "The share of probability that is drawn from. By default the model's own, else 1.",
    "top_k": "How many tokens are drawn from; 0 and -1 are all. Ours, as in other servers.",
    "min_p": "Tokens below this share of the likeliest one's probability are left out. Ours, as in other servers.",
    "presence_penalty": "Subtracted from the logits of tokens that the answer has already.",
    "frequency_penalty": "The same, for each time that it has them.",
    "repetition_penalty": "Divides the logits of tokens that prompt or answer have. Ours, as in other servers.",
    "logit_bias": "Token id to what is added to its logit.",
    "seed": "The same seed gives the same answer, whatever else runs.",
    "stop": "Up to 4 strings that end the answer; they are not part of it.",
    "stop_token_ids": "Tokens that end the answer. Ours.",
    "include_stop_str_in_output": "Whether the stop string is part of the answer. Ours.",
    "ignore_eos": "Whether the answer goes on after the model's end token, up to its longest length. Ours.",
    "min_tokens": "The answer does not end before so many tokens. Ours.",
    "max_tokens": "The most tokens of an answer. By default as many as fit (chat), or 16 (completions).",
    "max_completion_tokens": "The same as `max_tokens`.",
    "skip_special_tokens": "Whether special tokens are left out of the text; true by default. Ours.",
    "prompt_logprobs": "How many alternatives to report for each token of the prompt. Ours.",
    "logprobs": "Chat: whether to report log-probabilities. Completions: of how many tokens, at most 5.",
    "top_logprobs": "Of how many tokens, with `logprobs`.",
    "echo": "Whether the prompt is part of the answer.",
    "best_of": "Must equal `n`; other values are refused with status 400.",
    "suffix": f"{_REFUSED} An empty string is accepted.",
    "cache_salt": "Requests share cached prefixes only with requests of the same salt and organisation. Ours.",
    "priority": "Makes the request less important than its tier's priority; smaller is more important. Ours.",
    "tools": "Shown to the model by its chat template; refused where the template does not read them, and with "
    "`strict: true`. The answer is not parsed into calls yet.",
    "tool_choice": "`none` or `auto`. `required` and a named function are refused with status 400.",
    "parallel_tool_calls": "`false` is refused together with tools.",
    "response_format": "`text`. `json_object` and `json_schema` are refused with status 400.",
    "modalities": "Only `[text]`; others are refused with status 400.",
    "service_tier": "`auto`, `default` or the name of the key's own tier.",
    "reasoning_effort": _REFUSED,
    "verbosity": "Only `medium`; others are refused with status 400.",
    "user": "Whose request it is, for the routing policy `session`.",
    "store": _IGNORED,
    "metadata": _IGNORED,
    "safety_identifier": _IGNORED,
    "prompt_cache_key": "Which session it is, for the routing policy `session`; before `user`.",
    "prompt_cache_retention": _IGNORED,
    "prediction": _IGNORED,
    "audio": _REFUSED,
    "web_search_options": _REFUSED,
    "functions": _REFUSED,
    "function_call": _REFUSED,
    "add_generation_prompt": "Whether the template begins the assistant's turn; true by default. Ours.",
    "continue_final_message": "Whether the answer goes on with the last message instead of a new turn. Ours.",
    "input": "What is to be embedded. No model supports that yet: the endpoint answers status 400.",
    "encoding_format": _IGNORED,
    "dimensions": _IGNORED,
}
_INTRODUCTION = """\
# API

<!-- Made by `python -m deployments.gateway.reference > docs/api.md`: change the types, not this file. -->

The API is OpenAI's, as far as this page says. A running server describes it in full at `GET /openapi.json`.

* **Keys** come as `Authorization: Bearer KEY`, where the configuration asks for keys. A key's scopes say what it may
  do: `models.read`, `inference`, `admin` (`batch` is reserved).
* **Bodies** are JSON, also compressed (`content-encoding: gzip`). `null` is the same as an absent field. A field that
  nobody knows is ignored, and the answer's header `x-ignored-fields` names it; with `gateway.unknown_fields: reject` it
  is refused. Fields of OpenAI's that change nothing here (`store`, `metadata`, `safety_identifier`, ...) are accepted
  without effect, as the tables say.
* **Fields of other servers** that would change the answer and that nothing here reads are refused with status 400:
  {changing}.
* **Streams** are server-sent events; the last is `data: [DONE]`. An error within a stream is an event with `error`, and
  no `[DONE]` follows.
* **Errors** are `{"error": {"message", "type", "param", "code"}}`, all four always there.

| status | when |
|---|---|
| 400 | the request is wrong; `param` names the field |
| 401 | there is no key, or not one that is known, active and not expired |
| 403 | the key lacks the scope, or its tier does not exist |
| 404, 405 | no such path, model or object; no such method |
| 408 | the body did not come in time (`gateway.body_timeout_s`) |
| 409 | the key is revoked, which cannot be undone (admin API) |
| 413 | the body is larger than `gateway.max_body_bytes` |
| 415 | the encoding of the body is not known |
| 429 | a limit (`rate_limit_exceeded`) or the month's budget (`insufficient_quota`) is used up |
| 431 | more than 200 headers, or 64 KB of them |
| 500 | a fault of the server's |
| 503 | overloaded, starting, or a database or limit store cannot be reached; `code` says which |
"""


def reference() -> str:
    """The whole page, as Markdown."""
    operations = (*OPERATIONS, *POOL_OPERATIONS, *ADMIN_OPERATIONS)
    described = document(operations)
    schemas = described["components"]["schemas"]
    parts = [
        _INTRODUCTION.replace("{changing}", ", ".join(f"`{name}`" for name in sorted(CHANGING_FIELDS))),
        "## Endpoints\n",
        _table(("endpoint", "what it answers", "needs"), map(_endpoint, operations)),
    ]
    for operation in operations:
        if operation.body in BODIES:
            parts += [f"## {operation.method} {operation.path}\n", _parameters(schemas[operation.body.__name__])]
    parts.append("## Headers of answers\n")
    headers = described["components"]["headers"]
    parts.append(_table(("header", "meaning"), ((f"`{name}`", h["description"]) for name, h in headers.items())))
    parts.append(
        "A request may bring `x-request-id` (its id in logs and answers) and `x-session-id` (its session, for the\n"
        "routing policy `session`).\n"
    )
    parts.append("## The admin API\n")
    parts.append(
        "It needs a key with the scope `admin`, and, except for pools and draining, a key database "
        "(`gateway.keys.database`). Lists have `data` and `has_more`. Every change is in the audit log.\n"
    )
    for operation in (*POOL_OPERATIONS, *ADMIN_OPERATIONS):
        fields = operation.body or operation.query
        if fields is not None:
            parts += [
                f"### {operation.method} {operation.path}\n",
                f"{operation.summary} {inspect.cleandoc(fields.__doc__ or '')}\n",
            ]
            parts.append(_fields(fields.model_json_schema()))
    return "\n".join(parts)


def _endpoint(operation: Operation) -> tuple[str, str, str]:
    scope = "inference" if operation.path.startswith(("/v1/", "/tokenize")) else "admin"
    scope = "models.read" if operation.path.startswith("/v1/models") else scope
    needs = f"`{scope}`" if operation.keyed else "no key"
    return f"`{operation.method} {operation.path}`", operation.summary, needs


def _parameters(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (f"`{name}`" + (" (required)" if name in required else ""), _words(member), PARAMETERS[name])
        for name, member in schema["properties"].items()
    ]
    return _table(("parameter", "type", "meaning"), rows)


def _fields(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (f"`{name}`", _words(member), "required" if name in required else f"`{member.get('default')}`")
        for name, member in schema["properties"].items()
    ]
    return _table(("field", "type", "default"), rows)


def _words(schema: Mapping[str, Any]) -> str:
    """The type in words. That a field may be null goes without saying."""
    options = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    words = [type_words(option) for option in options] or [type_words(schema)]
    return " or ".join(dict.fromkeys(words))


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = ["| " + " | ".join(cells).replace("\n", " ") + " |" for cells in (head, ("---",) * len(head), *rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")

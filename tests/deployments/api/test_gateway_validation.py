"""What a body can get wrong is a 400 that names the parameter, in OpenAI's words, and never reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers_gateway import COUNT, HI, MODEL, FakeBackend, client, demo_model, error_of

from deployments.api.body import MAX_CONTAINERS, MAX_STRINGS
from deployments.config.gateway import GatewayConfig

CHAT, COMP = "/v1/chat/completions", "/v1/completions"


class _Absent:
    """Its name is part of tests' ids, which must be the same in every process."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


def body_for(path: str, **changes: Any) -> dict[str, Any]:
    body = {"model": MODEL, "max_tokens": 4, **({"messages": HI} if path == CHAT else {"prompt": COUNT})}
    return {k: v for k, v in {**body, **changes}.items() if v is not ABSENT}


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


SAID = {"role": "assistant", "content": "x"}


def called(arguments: Any, **changes: Any) -> list[Any]:
    function = {"name": "f", "arguments": arguments}
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "42", **changes},
    ]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

# field -> bad value -> (param, code); what is common to both endpoints.
BOTH: list[tuple[str, Any, str | None]] = [
    ("model", ABSENT, "missing_required_parameter"),
    ("model", None, "missing_required_parameter"),
    ("model", 5, "invalid_type"),
    ("temperature", -0.1, "decimal_below_min_value"),
    ("temperature", 2.1, "decimal_above_max_value"),
    ("temperature", 3, "decimal_above_max_value"),
    ("temperature", "0.5", "invalid_type"),
    ("temperature", True, "invalid_type"),
    ("top_p", 1.5, "decimal_above_max_value"),
    ("top_p", -0.1, "decimal_below_min_value"),
    ("n", 0, "integer_below_min_value"),
    ("n", 129, "integer_above_max_value"),
    ("n", "two", "invalid_type"),
    ("n", True, "invalid_type"),
    ("max_tokens", -1, "integer_below_min_value"),
    ("max_tokens", "5", "invalid_type"),
    ("max_tokens", 1.5, "invalid_type"),
    ("max_tokens", -1.0, "integer_below_min_value"),
    ("seed", 9007199254740994.0, "invalid_type"),
    ("max_tokens", 10**30, "invalid_type"),
    ("presence_penalty", 3, "decimal_above_max_value"),
    ("frequency_penalty", -2.5, "decimal_below_min_value"),
    ("stop", 5, "invalid_type"),
    ("stop", ["a", "b", "c", "d", "e"], "array_above_max_length"),
    ("stop", "", "invalid_value"),
    ("logit_bias", {"abc": 5}, "invalid_value"),
    ("logit_bias", {"49152": 5}, "invalid_value"),
    ("logit_bias", {"-1": 5}, "invalid_value"),
    ("logit_bias", [1], "invalid_type"),
    ("seed", "x", "invalid_type"),
    ("seed", 2**63, "integer_above_max_value"),
    ("stream", "maybe", "invalid_type"),
    ("stream", 1, "invalid_type"),
    ("stream_options", {"include_usage": True}, None),
    ("stream_options", True, "invalid_type"),
    ("user", 5, "invalid_type"),
    ("top_k", -2, "integer_below_min_value"),
    ("top_k", 1.5, "invalid_type"),
    ("min_p", 1.5, "decimal_above_max_value"),
    ("repetition_penalty", 0, "decimal_below_min_value"),
    ("min_tokens", 5, "integer_above_max_value"),
    ("ignore_eos", "yes", "invalid_type"),
    ("cache_salt", 5, "invalid_type"),
    ("priority", -1, "integer_below_min_value"),
]


@pytest.mark.parametrize("path", [CHAT, COMP])
@pytest.mark.parametrize(("field", "value", "code"), BOTH, ids=lambda v: repr(v)[:24])
async def test_common_fields(path: str, field: str, value: Any, code: str | None) -> None:
    backend = FakeBackend()
    async with client(backend) as http:
        error = error_of(await http.post(path, json=body_for(path, **{field: value})), 400)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", field, code)
    assert not backend.calls


ONE_PATH: list[tuple[str, dict[str, Any], str | None, str | None]] = [
    (CHAT, {"messages": "hi"}, "messages", "invalid_type"),
    (CHAT, {"messages": []}, "messages", "empty_array"),
    (CHAT, {"messages": ABSENT}, "messages", "missing_required_parameter"),
    (CHAT, {"messages": [None]}, "messages[0]", "invalid_type"),
    (CHAT, {"messages": [*HI, {"role": "banana", "content": "x"}]}, "messages[1].role", "invalid_value"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    (CHAT, {"messages": [{"role": 5, "content": "x"}]}, "messages[0].role", "invalid_type"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    (CHAT, {"messages": user(None)}, "messages[0].content", "invalid_type"),
    (CHAT, {"messages": user([])}, "messages[0].content", "empty_array"),
    (CHAT, {"messages": user([{"type": "text"}])}, "messages[0].content[0].text", "missing_required_parameter"),
    (CHAT, {"messages": user([{"type": "image_url"}])}, "messages[0].content[0].type", "unsupported_value"),
    (CHAT, {"messages": user([{"type": "poem"}])}, "messages[0].content[0].type", "invalid_value"),
    (CHAT, {"messages": [{"role": "assistant"}]}, "messages[0].content", "missing_required_parameter"),
    (CHAT, {"messages": [SAID | {"refusal": False}]}, "messages[0].refusal", "invalid_type"),
    (CHAT, {"messages": [SAID | {"content": None, "refusal": 1}]}, "messages[0].refusal", "invalid_type"),
    (CHAT, {"messages": called("[1]")}, "messages[1].tool_calls[0].function.arguments", "invalid_value"),
    (CHAT, {"messages": called("{bad")}, "messages[1].tool_calls[0].function.arguments", "invalid_value"),
    (CHAT, {"messages": called({"x": 1})}, "messages[1].tool_calls[0].function.arguments", "invalid_type"),
    (CHAT, {"messages": called("", tool_call_id=None)}, "messages[2].tool_call_id", "missing_required_parameter"),
    (CHAT, {"messages": called("", tool_call_id="c2")}, "messages[2].tool_call_id", "invalid_value"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    (CHAT, {"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "invalid_value"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    (CHAT, {"logprobs": 3}, "logprobs", "invalid_type"),
    (CHAT, {"response_format": {"type": "poem"}}, "response_format.type", "invalid_value"),
    (CHAT, {"response_format": {}}, "response_format.type", "missing_required_parameter"),
    (CHAT, {"response_format": "text"}, "response_format", "invalid_type"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format.type", "unsupported_value"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.type", "unsupported_value"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", "unsupported_value"),
    (CHAT, {"audio": {}}, "audio", "unsupported_parameter"),
    (CHAT, {"functions": []}, "functions", "unsupported_parameter"),
    (CHAT, {"metadata": {"k": 5}}, "metadata.k", "invalid_type"),
    (CHAT, {"metadata": {"k": "v" * 513}}, "metadata.k", "string_above_max_length"),
    (CHAT, {"metadata": {str(i): "" for i in range(17)}}, "metadata", "object_above_max_properties"),
    (CHAT, {"service_tier": "gold"}, "service_tier", "invalid_value"),
    (CHAT, {"tools": {}}, "tools", "invalid_type"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    (CHAT, {"tools": [{"type": "magic"}]}, "tools[0].type", "invalid_value"),
    (CHAT, {"tools": [{**TOOL, "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
    (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "unsupported_value"),
    (CHAT, {"tools": [TOOL], "tool_choice": TOOL}, "tool_choice", "unsupported_value"),
    (CHAT, {"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "invalid_value"),
    (CHAT, {"tool_choice": "auto"}, "tool_choice", None),
    (CHAT, {"tools": [TOOL]}, "tools", "unsupported_parameter"),  # this model's template does not read them
    (CHAT, {"tools": [TOOL], "tool_choice": "auto"}, "tools", "unsupported_parameter"),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
        "tools[0].function.strict",
        "unsupported_value",
    ),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
    (CHAT, {"verbosity": "low"}, "verbosity", "invalid_value"),
    (CHAT, {"guided_json": {"type": "object"}}, "guided_json", "unsupported_parameter"),
    (CHAT, {"structured_outputs": {"choice": ["a"]}}, "structured_outputs", "unsupported_parameter"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", "unsupported_parameter"),
    (CHAT, {"enable_thinking": False}, "enable_thinking", "unsupported_parameter"),
    (COMP, {"guided_regex": "a+"}, "guided_regex", "unsupported_parameter"),
    (COMP, {"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
    (COMP, {"length_penalty": 0.5}, "length_penalty", "unsupported_parameter"),
    (COMP, {"add_special_tokens": False}, "add_special_tokens", "unsupported_parameter"),
    (CHAT, {"continue_final_message": True}, "continue_final_message", "invalid_value"),
    (CHAT, {"messages": [{**HI[0], "name": 5}]}, "messages[0].name", "invalid_type"),
    (CHAT, {"messages": [{**HI[0], "name": "a b"}]}, "messages[0].name", "invalid_value"),
    (CHAT, {"messages": [{**HI[0], "name": "<|im_end|>"}]}, "messages[0].name", "invalid_value"),
    (CHAT, {"messages": [{**HI[0], "name": "n" * 65}]}, "messages[0].name", "string_above_max_length"),
    (
        CHAT,
        {"messages": called('{"a": ' + "[" * 70 + "]" * 70 + "}")},
        "messages[1].tool_calls[0].function.arguments",
        "invalid_value",
    ),
    (CHAT, {"reasoning_effort": "huge"}, "reasoning_effort", "unsupported_parameter"),
    (CHAT, {"verbosity": "loud"}, "verbosity", "invalid_value"),
    (CHAT, {"prompt_cache_retention": "1h"}, "prompt_cache_retention", "invalid_value"),
    (CHAT, {"prompt_cache_key": "k" * 65}, "prompt_cache_key", "string_above_max_length"),
    (CHAT, {"safety_identifier": "s" * 65}, "safety_identifier", "string_above_max_length"),
    (CHAT, {"prediction": {"type": "guess", "content": "x"}}, "prediction.type", "invalid_value"),
    (CHAT, {"prediction": {"type": "content"}}, "prediction.content", "missing_required_parameter"),
    (CHAT, {"modalities": ["poem"]}, "modalities", "unsupported_value"),
    (CHAT, {"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    (CHAT, {"function_call": "auto"}, "function_call", "unsupported_parameter"),
    (CHAT, {"store": 1}, "store", "invalid_type"),
    (CHAT, {"parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_type"),
    (CHAT, {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
    (COMP, {"prompt": ABSENT}, "prompt", "missing_required_parameter"),
    (COMP, {"prompt": ""}, "prompt", "empty_prompt"),
    (COMP, {"prompt": []}, "prompt", "empty_prompt"),
    (COMP, {"prompt": [""]}, "prompt[0]", "empty_prompt"),
    (COMP, {"prompt": [[]]}, "prompt[0]", "empty_prompt"),
    (COMP, {"prompt": ["a", ""]}, "prompt[1]", "empty_prompt"),
    (COMP, {"prompt": ["a", 1]}, "prompt[1]", "invalid_type"),
    (COMP, {"prompt": [[1, 2], "a"]}, "prompt[1]", "invalid_type"),
    (COMP, {"prompt": [1, [2]]}, "prompt[1]", "invalid_type"),
    (COMP, {"prompt": {"a": 1}}, "prompt", "invalid_type"),
    (COMP, {"prompt": 5}, "prompt", "invalid_type"),
    (COMP, {"prompt": [None]}, "prompt[0]", "invalid_type"),
    (COMP, {"prompt": [1.5]}, "prompt[0]", "invalid_type"),
    (COMP, {"prompt": [True]}, "prompt[0]", "invalid_type"),
    (COMP, {"prompt": [1, True]}, "prompt[1]", "invalid_type"),
    (COMP, {"prompt": [-1]}, "prompt[0]", "integer_below_min_value"),
    (COMP, {"prompt": [49152]}, "prompt[0]", "integer_above_max_value"),
    (COMP, {"prompt": [9223372036854775808]}, "prompt[0]", "integer_above_max_value"),
    (COMP, {"prompt": [10**40]}, "prompt[0]", "invalid_type"),
    (COMP, {"prompt": [[9825, 42], [49152]]}, "prompt[1][0]", "integer_above_max_value"),
    (COMP, {"prompt": ["a"] * 2049}, "prompt", "array_above_max_length"),
    (COMP, {"prompt": ["a"] * 2000, "n": 3}, "n", "integer_above_max_value"),
    (COMP, {"logprobs": 99}, "logprobs", "integer_above_max_value"),
    (COMP, {"logprobs": True}, "logprobs", "invalid_type"),
    (COMP, {"suffix": "x"}, "suffix", "unsupported_parameter"),
    (COMP, {"best_of": 2}, "best_of", "unsupported_value"),
    (COMP, {"stop_token_ids": [49152]}, "stop_token_ids[0]", "integer_above_max_value"),
    (COMP, {"stop_token_ids": ["a"]}, "stop_token_ids[0]", "invalid_type"),
    (COMP, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", None),
]


@pytest.mark.parametrize(("path", "changes", "param", "code"), ONE_PATH, ids=lambda v: repr(v)[:40])
async def test_fields_of_one_endpoint(path: str, changes: dict[str, Any], param: str, code: str | None) -> None:
    backend = FakeBackend()
    async with client(backend) as http:
        error = error_of(await http.post(path, json=body_for(path, **changes)), 400)
    assert (error["param"], error["code"]) == (param, code)
    assert not backend.calls


async def test_message_has_openai_wording() -> None:
    async with client(FakeBackend()) as http:
        error = error_of(await http.post(COMP, json=body_for(COMP, temperature=2.1)), 400)
        assert error["message"] == (
            "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 2.1 instead."
        )
        error = error_of(await http.post(COMP, json=body_for(COMP, n=0)), 400)
        assert error["message"] == (
            "Invalid 'n': integer below minimum value. Expected a value >= 1, but got 0 instead."
        )
        error = error_of(await http.post(COMP, json=body_for(COMP, temperature="hot")), 400)
        assert error["message"] == ("Invalid type for 'temperature': expected a decimal, but got a string instead.")


@pytest.mark.parametrize("path", [CHAT, COMP])
async def test_null_is_absent(path: str) -> None:
    names = (
        "temperature top_p n max_tokens stop stream stream_options seed logit_bias logprobs user top_k min_tokens "
        "tools tool_choice response_format suffix best_of echo"
    )
    nulls = dict.fromkeys(names.split())
    backend = FakeBackend()
    async with client(backend) as http:
        response = await http.post(path, json=body_for(path, **nulls))
    assert response.status_code == 200, response.text
    assert backend.calls[0][0].sampling.max_tokens == (16 if path == COMP else 8192 - 31)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMP])
async def test_unknown_model(path: str, stream: bool) -> None:
    async with client(FakeBackend()) as http:
        error = error_of(await http.post(path, json=body_for(path, model="no-such-model", stream=stream)), 404)
    assert error["code"] == "model_not_found"


async def test_unknown_fields_are_a_choice() -> None:
    body = body_for(COMP, flavour="mint")
    async with client(FakeBackend()) as http:
        response = await http.post(COMP, json=body)
        known = await http.post(COMP, json=body_for(COMP))
    assert (response.status_code, response.headers["x-ignored-fields"]) == (200, "flavour")
    assert "x-ignored-fields" not in known.headers
    async with client(FakeBackend(), GatewayConfig(unknown_fields="reject")) as http:
        error = error_of(await http.post(COMP, json=body), 400)
    assert (error["param"], error["code"]) == ("flavour", "unknown_parameter")


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        (COMP, {"flavour": "mint"}, "flavour"),
        (COMP, {"messages": HI}, "messages"),
        (CHAT, {"stream": True, "stream_options": {"include_cost": True}}, "stream_options.include_cost"),
        (CHAT, {"messages": [{**HI[0], "mood": "good"}]}, "messages[0].mood"),
        (CHAT, {"messages": user([{"type": "text", "text": "x", "lang": "en"}])}, "messages[0].content[0].lang"),
        (CHAT, {"messages": [*called("")[:2], {**called("")[2], "x": 1}]}, "messages[2].x"),
        (CHAT, {"tools": [{**TOOL, "cost": 1}]}, "tools[0].cost"),
        (CHAT, {"prediction": {"type": "content", "content": "x", "sure": 1}}, "prediction.sure"),
    ],
)
async def test_unknown_members_are_refused_at_any_depth(path: str, changes: dict[str, Any], param: str) -> None:
    async with client(FakeBackend(), GatewayConfig(unknown_fields="reject")) as http:
        error = error_of(await http.post(path, json=body_for(path, **changes)), 400)
    assert (error["param"], error["code"], error["message"]) == (
        param, "unknown_parameter", f"Unknown parameter: '{param}'."
    )  # fmt: skip


async def test_free_members_stay_free_and_answers_may_be_sent_back() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"anything": {"goes": 1}}}}
    async with client(FakeBackend(), GatewayConfig(unknown_fields="reject")) as http:
        said = (await http.post(CHAT, json=body_for(CHAT))).json()["choices"][0]["message"]
        body = body_for(
            CHAT,
            messages=[*HI, said, *HI],
            tools=[tool],
            tool_choice="none",
            metadata={"k": "v"},
            logit_bias={"5": 1},
        )
        response = await http.post(CHAT, json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("bomb", "what"),
    [
        (b"[" + b"[]," * MAX_CONTAINERS + b"1]", "arrays and objects"),
        (b"[" + b"{}," * MAX_CONTAINERS + b"1]", "arrays and objects"),
        (b"[" + b'"",' * (MAX_STRINGS + 1) + b"1]", "strings"),
        (b"[" + b'"\\\\",' * (MAX_STRINGS + 1) + b"1]", "strings"),
    ],
    ids=["arrays", "objects", "strings", "backslashes"],
)
async def test_a_body_of_too_many_parts_is_refused_before_they_are_made(bomb: bytes, what: str) -> None:
    raw = b'{"model": "%s", "junk": %s}' % (MODEL.encode(), bomb)
    async with client(FakeBackend()) as http:
        refused = await http.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert what in error_of(refused, 400)["message"]


@pytest.mark.parametrize(
    "tail", [b'\\"' * 2_000_000, b"\\" * 4_000_000, b"[" * 4_000_000], ids=["quotes", "slashes", "braces"]
)
async def test_a_string_without_an_end_takes_no_quadratic_time(tail: bytes) -> None:
    """Its time limit is the whole test's: at quadratic cost it would take hours."""
    raw = b"[" * MAX_CONTAINERS + b'"' + tail
    async with client(FakeBackend()) as http:
        error_of(await http.post(CHAT, content=raw), 400)


async def test_braces_and_quotes_in_text_are_not_parts() -> None:
    text = '[{"' * 5000 + "\\"
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "user": text * 8}
    assert json.dumps(body).count("[") > MAX_CONTAINERS
    async with client(FakeBackend()) as http:
        assert (await http.post(COMP, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "limit", "code"),
    [
        ("modalities", [1] * 100_000, 16, "array_above_max_length"),
        ("stop_token_ids", ["a"] * 100_000, 128, "array_above_max_length"),
        ("logit_bias", {str(i): "x" for i in range(100_000)}, 4096, "object_above_max_properties"),
        ("metadata", {str(i): 1 for i in range(100_000)}, 16, "object_above_max_properties"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_the_length_is_refused_before_each_member_is(field: str, value: Any, limit: int, code: str) -> None:
    async with client(FakeBackend()) as http:
        error = error_of(await http.post(CHAT, json={"model": MODEL, "messages": HI, field: value}), 400)
    assert (error["param"], error["code"]) == (field, code)
    assert f"maximum length {limit}, but got length 100000" in error["message"]


async def test_the_header_of_ignored_fields_is_bounded_and_printable() -> None:
    fields = {"a\r\nx-evil: 1": 1, "\u4e2d": 2, "n" * 100: 3, **{f"f{i}": i for i in range(20)}}
    async with client(FakeBackend()) as http:
        response = await http.post("/tokenize", json={"model": MODEL, "prompt": "x", **fields})
    names = response.headers["x-ignored-fields"].split(", ")
    assert names[:4] == ["a??x-evil:?1", "?", "n" * 64, "f0"]
    assert (len(names), names[-1]) == (11, "...")


@pytest.mark.parametrize("path", [CHAT, COMP])
async def test_what_other_servers_do_by_default_may_be_said(path: str) -> None:
    """Clients of other servers send these values although they are what happens anyhow."""
    fields = {"length_penalty": 1.0, "use_beam_search": False, "add_special_tokens": True, "chat_template_kwargs": {}}
    async with client(FakeBackend()) as http:
        response = await http.post(path, json=body_for(path, **fields, guided_json=None))
    assert response.status_code == 200, response.text


async def test_nesting_is_bounded() -> None:
    def nested(depth: int) -> dict[str, Any]:
        parameters: dict[str, Any] = {}
        for _ in range(depth):
            parameters = {"a": parameters}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        return body_for(CHAT, tools=[tool], tool_choice="none")

    async with client(FakeBackend()) as http:
        assert (await http.post(CHAT, json=nested(59))).status_code == 200
        assert "64 levels" in error_of(await http.post(CHAT, json=nested(60)), 400)["message"]


async def test_tools_need_messages_to_be_tokenized_with() -> None:
    async with client(FakeBackend()) as http:
        error = error_of(await http.post("/tokenize", json={"model": MODEL, "prompt": "x", "tools": [TOOL]}), 400)
    assert error["param"] == "tools"


ACCEPTED_HINTS = {
    "user": "u", "store": True, "parallel_tool_calls": True, "service_tier": "auto", "metadata": {"k": "v"},
    "safety_identifier": "s", "prompt_cache_key": "p", "verbosity": "medium", "prompt_cache_retention": "24h",
    "response_format": {"type": "text"}, "modalities": ["text"], "prediction": {"type": "content", "content": "x"},
    "tools": [TOOL], "tool_choice": "none",
}  # fmt: skip


async def test_hints_change_nothing() -> None:
    backend = FakeBackend()
    async with client(backend) as http:
        response = await http.post(CHAT, json=body_for(CHAT, **ACCEPTED_HINTS))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", [CHAT, COMP])
async def test_a_decimal_without_a_fraction_is_an_integer(path: str) -> None:
    """JSON Schema says so, and some languages have only one kind of number."""
    backend = FakeBackend()
    prompt = {} if path == CHAT else {"prompt": [[9825.0, 42.0], [9825, 42]]}
    numbers = {"max_tokens": 2.0, "n": 1.0, "seed": -7.0, "stop_token_ids": [3.0], "top_k": 5.0}
    async with client(backend) as http:
        response = await http.post(path, json=body_for(path, **prompt, **numbers))
    assert response.status_code == 200, response.text
    assert len(backend.calls) == 1
    for request in backend.calls[0]:
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.seed, sampling.top_k) == (2, -7, 5)
        assert all(type(token_id) is int for token_id in (*request.prompt, *sampling.stop_token_ids))


# max_model_len 64: (ids in the prompt, max_tokens, tokens of the answer or None for a refusal)
@pytest.mark.parametrize(
    ("prompt", "asked", "got"),
    [(63, 1, 1), (60, None, 4), (10, None, 16), (64, 0, 0), (64, 1, None), (65, None, None), (64, None, None),
     (63, 2, None), (10, 1000, None), (65, 0, None)],
)  # fmt: skip
async def test_context_arithmetic(prompt: int, asked: int | None, got: int | None) -> None:
    async with client(FakeBackend(served={MODEL: demo_model(max_model_len=64)})) as http:
        response = await http.post(COMP, json={"model": MODEL, "prompt": [9825] * prompt, "max_tokens": asked})
    if got is not None:
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == got
        assert response.json()["choices"][0]["finish_reason"] == "length"
        return
    error = error_of(response, 400)
    assert error["code"] == "context_length_exceeded"
    assert "64" in error["message"] and str(prompt) in error["message"] and "-" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_long_chat_is_refused_not_cut(stream: bool) -> None:
    messages = [{"role": "system", "content": "Secret word: teal-otter."}, *user("word " * 300)]
    async with client(FakeBackend(served={MODEL: demo_model(max_model_len=128)})) as http:
        error = error_of(await http.post(CHAT, json={"model": MODEL, "messages": messages, "stream": stream}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_hopeless_text_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("tokenized")

    model = demo_model(max_model_len=64)
    for name in ("encode", "encode_rendered", "encode_pieces"):
        monkeypatch.setattr(type(model.text.tokenizer), name, never)
    async with client(FakeBackend(served={MODEL: model})) as http:
        for path, field in ((COMP, {"prompt": "a " * 50_000}), (CHAT, {"messages": user("a " * 50_000)})):
            error = error_of(await http.post(path, json={"model": MODEL, **field}), 400)
            assert error["code"] == "context_length_exceeded" and "at least" in error["message"]


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400"])
async def test_numbers_that_are_not_json(literal: str) -> None:
    raw = json.dumps(body_for(COMP))[:-1] + f', "temperature": {literal}}}'
    async with client(FakeBackend()) as http:
        error_of(await http.post(COMP, content=raw.encode()), 400)

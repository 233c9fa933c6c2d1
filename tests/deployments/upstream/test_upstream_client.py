"""An upstream that answers well, badly, late or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import pytest
from helpers_upstream import DONE, GOOD, USAGE, Item, StandIn, event, said
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deployments.config.upstream import UpstreamConfig
from deployments.upstream.answer import Answer
from deployments.upstream.client import Upstream, UpstreamCall
from deployments.upstream.errors import (
    UpstreamBusyError,
    UpstreamDownError,
    UpstreamError,
    UpstreamRefusedError,
    UpstreamSlowError,
)
from engine.errors import ContextLengthError
from engine.types import FinishReason, TokenDelta

FIELDS = {
    "model": "ours",
    "messages": [{"role": "user", "content": "hi"}],
    "cache_salt": "x",
    "top_k": 5,
    "stream": False,
}
CALL = UpstreamCall("/chat/completions", FIELDS, ["r"], 1, 20)


def upstream(stand_in: StandIn, **settings: Any) -> Upstream:
    config = {"name": "elsewhere", "base_url": "https://example.invalid/v1", **settings}
    return Upstream(UpstreamConfig.model_validate(config), stand_in)


async def run(stand_in: StandIn, call: UpstreamCall = CALL, **settings: Any) -> list[TokenDelta]:
    client = upstream(stand_in, **settings)
    try:
        return [delta async for deltas in client.generate(call) for delta in deltas]
    finally:
        await client.close()


def text(deltas: list[TokenDelta], index: int = 0) -> str:
    return "".join(d.text for d in deltas if d.index == index)


async def test_a_good_answer_with_usage() -> None:
    deltas = await run(StandIn())
    assert text(deltas) == "one two"
    last = deltas[-1]
    assert (last.finish_reason, last.num_prompt_tokens, last.num_completion_tokens, last.num_cached_tokens) == (
        FinishReason.STOP,
        7,
        5,
        3,
    )
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)


async def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSEWHERE_KEY", "sk-secret")
    stand_in = StandIn()
    await run(stand_in, api_key="env:ELSEWHERE_KEY", models={"ours": "theirs"}, drop_fields=["top_k"])
    [(request, body)] = stand_in.asked
    assert str(request.url) == "https://example.invalid/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer sk-secret"
    assert body == {
        "model": "theirs",
        "messages": FIELDS["messages"],
        "max_tokens": 20,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_a_model_without_another_name_keeps_its_own() -> None:
    stand_in = StandIn()
    await run(stand_in)
    assert stand_in.asked[0][1]["model"] == "ours" and "authorization" not in stand_in.asked[0][0].headers


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(ValueError, match=r"upstreams.elsewhere.api_key: the environment variable 'NOT_SET' is not set"):
        upstream(StandIn(), api_key="env:NOT_SET")


@pytest.mark.parametrize("wrong", [{"api_key": "sk-plain"}, {"base_url": "example.com"}, {"name": "a b"}, {"x": 1}])
def test_impossible_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        upstream(StandIn(), **wrong)


async def test_completions_with_several_prompts_and_choices() -> None:
    def piece(index: int, text: str, finish: str | None = None) -> bytes:
        return event({"choices": [{"index": index, "text": text, "finish_reason": finish}]})

    items = [piece(3, "d"), piece(0, "a"), piece(1, "b", "length"), piece(2, "c", "stop"), piece(0, "A", "stop")]
    items += [piece(3, "", "length"), USAGE, DONE]
    deltas = await run(
        StandIn(items), UpstreamCall("/completions", {"model": "m", "prompt": ["p", "q"]}, ["r0", "r1"], 2, 9)
    )
    ends = {(d.request_id, d.index): d for d in deltas if d.finish_reason}
    assert {key: end.finish_reason for key, end in ends.items()} == {
        ("r0", 0): FinishReason.STOP,
        ("r0", 1): FinishReason.LENGTH,
        ("r1", 0): FinishReason.STOP,
        ("r1", 1): FinishReason.LENGTH,
    }
    assert sum(end.num_completion_tokens for end in ends.values()) == 5
    assert {key: "".join(d.text for d in deltas if (d.request_id, d.index) == key) for key in ends} == {
        ("r0", 0): "aA",
        ("r0", 1): "b",
        ("r1", 0): "c",
        ("r1", 1): "d",
    }


async def test_without_usage_chunks_are_counted_and_done_may_be_missing() -> None:
    deltas = await run(StandIn([said("a"), said("b", 0, "length")]))
    assert deltas[-1].num_completion_tokens == 2


ERROR = event({"error": {"message": "boom"}})
GARBAGE: dict[str, list[Item]] = {
    "not json": [event(b"{oops"), DONE],
    "not an object": [event([1]), DONE],
    "no choices": [event({"id": 1}), DONE],
    "a choice of no kind": [event({"choices": [7]}), DONE],
    "no index": [event({"choices": [{"delta": {"content": "x"}}]}), DONE],
    "another index": [said("x", 1), DONE],
    "a negative index": [said("x", -1), DONE],
    "text that is none": [event({"choices": [{"index": 0, "delta": {"content": 5}}]}), DONE],
    "text after the end": [said("x", 0, "stop"), said("y"), DONE],
    "an end of no kind": [said("x", 0, "bored"), DONE],
    "an error event": [said("x"), ERROR],
    "cut": [said("x")],
    "cut in an event": [said("x"), b'data: {"choi'],
    "an end before the end": [said("x"), DONE],
    "nothing": [],
    "a connection that breaks": [said("x"), httpx.ReadError("reset")],
    "an endless line": [b"data: " + b"x" * 5_000_000],
}


@pytest.mark.parametrize("items", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_and_cuts(items: list[Item]) -> None:
    stand_in = StandIn(items)
    with pytest.raises(UpstreamDownError):
        await run(stand_in)
    assert stand_in.closed


async def test_an_answer_that_is_no_stream() -> None:
    with pytest.raises(UpstreamDownError):
        await run(StandIn([b"<html>"], headers={"content-type": "text/html"}))


def error_body(**fields: Any) -> list[Item]:
    return [json.dumps({"error": {"message": "words", **fields}}).encode()]


@pytest.mark.parametrize(
    ("status", "items", "kind"),
    [
        (500, [b"oops"], UpstreamDownError),
        (502, [], UpstreamDownError),
        (401, error_body(code="invalid_api_key"), UpstreamDownError),
        (403, error_body(), UpstreamDownError),
        (404, error_body(code="model_not_found"), UpstreamDownError),
        (301, [], UpstreamDownError),
        (429, error_body(), UpstreamBusyError),
        (503, error_body(), UpstreamBusyError),
        (400, error_body(code="context_length_exceeded"), ContextLengthError),
        (400, error_body(message="the maximum context length is 4096 tokens"), ContextLengthError),
        (400, error_body(code="content_filter"), UpstreamRefusedError),
        (422, [b"not json"], UpstreamRefusedError),
        (500, [b"x" * 100_000], UpstreamDownError),
    ],
)
async def test_statuses(status: int, items: list[Item], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        await run(StandIn(items, status, {"content-type": "application/json"}))


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("-3", 0.0), ("soon", None), ("99999", 3600.0)])
async def test_retry_after(header: str, seconds: float | None) -> None:
    with pytest.raises(UpstreamBusyError) as busy:
        await run(StandIn([], 429, {"retry-after": header}))
    assert busy.value.retry_after_s == seconds


async def test_a_content_filter_is_the_end() -> None:
    with pytest.raises(UpstreamRefusedError) as refused:
        await run(StandIn([said("x"), said("", 0, "content_filter"), DONE]))
    assert refused.value.code == "content_filter"


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), httpx.RemoteProtocolError("eh")])
async def test_not_reachable(error: Exception) -> None:
    with pytest.raises(UpstreamDownError):
        await run(StandIn(down=error))


async def test_silence_before_the_first_token() -> None:
    for stand_in in (StandIn(silent=asyncio.Event()), StandIn([said(""), asyncio.Event()])):
        with pytest.raises(UpstreamSlowError):
            await run(stand_in, first_token_s=0.01)


async def test_silence_later() -> None:
    with pytest.raises(UpstreamSlowError):
        await run(StandIn([said("x"), httpx.ReadTimeout("")]))


async def test_leaving_closes_the_connection() -> None:
    stand_in = StandIn([said("x"), asyncio.Event()])
    client = upstream(stand_in)
    stream = client.generate(CALL)
    assert (await anext(stream))[0].text == "x"
    await stream.aclose()
    assert stand_in.closed


@given(st.lists(st.integers(1, 9), max_size=30), st.sampled_from([b"\n", b"\r\n"]))
async def test_events_however_they_are_cut(sizes: list[int], newline: bytes) -> None:
    whole = b": hello\n\n" + b"".join(item for item in GOOD if isinstance(item, bytes))
    whole = whole.replace(b"\n", newline)
    pieces: list[Item] = []
    for size in sizes:
        pieces.append(whole[:size])
        whole = whole[size:]
    assert text(await run(StandIn([*pieces, whole]))) == "one two"


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_no_event_is_a_fault_of_ours(payload: bytes) -> None:
    with contextlib.suppress(UpstreamError):
        Answer(["r"], 2).read([payload])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "index", "delta", "content", "text", "finish_reason", "usage"]), inner
        )
    ),
    max_leaves=12,
)


@given(st.lists(json_values, max_size=4), json_values)
def test_no_chunk_is_a_fault_of_ours(choices: list[Any], usage: Any) -> None:
    answer = Answer(["r"], 2)
    with contextlib.suppress(UpstreamError):
        answer.read([json.dumps({"choices": choices, "usage": usage}).encode()])
        answer.finish()

"""An upstream that answers well, badly, late or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from pathlib import Path
from typing import Any

import pytest
from helpers_tls import self_signed
from helpers_upstream import BREAK, DONE, GOOD, USAGE, Item, StandIn, event, said
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deployments.config.upstream import UpstreamConfig
from deployments.upstream.answer import UpstreamAnswer
from deployments.upstream.client import Upstream, UpstreamCall
from deployments.upstream.errors import (
    UpstreamBusyError,
    UpstreamDownError,
    UpstreamError,
    UpstreamFullError,
    UpstreamRefusedError,
    UpstreamSlowError,
    UpstreamUnreadError,
)
from engine.errors import ContextLengthError
from engine.types import FinishReason, TokenDelta

pytestmark = pytest.mark.sockets

FIELDS = {
    "model": "ours",
    "messages": [{"role": "user", "content": "hi"}],
    "cache_salt": "x",
    "top_k": 5,
    "stream": False,
}
CALL = UpstreamCall("/chat/completions", FIELDS, ["r"], 1, 20)


def config(**settings: Any) -> UpstreamConfig:
    return UpstreamConfig.model_validate({"name": "elsewhere", "base_url": "https://example.invalid/v1", **settings})


async def answer(client: Upstream, call: UpstreamCall = CALL) -> list[TokenDelta]:
    stream = await client.begin(call)
    try:
        return [delta async for deltas in stream for delta in deltas]
    finally:
        stream.close()


async def run(stand_in: StandIn, call: UpstreamCall = CALL, **settings: Any) -> list[TokenDelta]:
    async with stand_in.upstream(**settings) as client:
        return await answer(client, call)


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
    [(path, headers, body)] = stand_in.asked
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer sk-secret"
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
    assert stand_in.asked[0][2]["model"] == "ours" and "authorization" not in stand_in.asked[0][1]


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(ValueError, match=r"upstreams.elsewhere.api_key: the environment variable 'NOT_SET' is not set"):
        Upstream(config(api_key="env:NOT_SET"))


@pytest.mark.parametrize("wrong", [{"api_key": "sk-plain"}, {"base_url": "example.com"}, {"name": "a b"}, {"x": 1}])
def test_impossible_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        config(**wrong)


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
    "an error event": [said("x"), ERROR],
    "an end before the end": [said("x"), DONE],
    "a connection that breaks": [said("x"), BREAK],
    "an endless line": [b"data: " + b"x" * 5_000_000],
}


@pytest.mark.parametrize("items", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_and_cuts(items: list[Item]) -> None:
    stand_in = StandIn(items)
    async with stand_in.upstream() as client:
        with pytest.raises(UpstreamDownError):
            await answer(client)
        await stand_in.left()


@pytest.mark.parametrize(
    "items", [[said("x")], [said("x"), b'data: {"choi'], []], ids=["cut", "in an event", "nothing"]
)
async def test_an_answer_that_ends_too_early(items: list[Item]) -> None:
    stand_in = StandIn(items)
    async with stand_in.upstream() as client:
        with pytest.raises(UpstreamDownError, match="broke off"):
            await answer(client)
        stand_in.items = GOOD
        assert text(await answer(client)) == "one two" and stand_in.connections == 1  # as HTTP, it was complete


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("eos_token", FinishReason.STOP),
        ("stop_sequence", FinishReason.STOP),
        ("STOP", FinishReason.STOP),
        ("model_length", FinishReason.LENGTH),
        ("MAX_TOKENS", FinishReason.LENGTH),
    ],
)
async def test_other_servers_words_for_an_end(word: str, reason: FinishReason) -> None:
    deltas = await run(StandIn([said("x", 0, word), DONE]))
    assert text(deltas) == "x" and deltas[-1].finish_reason is reason


@pytest.mark.parametrize("word", ["tool_calls", "function_call", "bored"])
async def test_an_end_that_is_not_passed_on(word: str) -> None:
    with pytest.raises(UpstreamUnreadError, match="tool call" if "call" in word else "bored"):
        await run(StandIn([said("x", 0, word), DONE]))


async def test_thinking_is_a_sign_of_life() -> None:
    visible = asyncio.Event()
    thought = event({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]})
    asyncio.get_running_loop().call_later(0.5, visible.set)
    deltas = await run(StandIn([thought, visible, said("x", 0, "stop"), USAGE, DONE]), first_token_s=0.3)
    assert text(deltas) == "x" and deltas[-1].num_completion_tokens == 5


@pytest.mark.parametrize("settings", [{}, {"api_key": "env:ELSEWHERE_KEY"}], ids=["no key", "a key of its own"])
async def test_nothing_of_the_callers_head_goes_out(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are not passed on: what an upstream gets is made here."""
    monkeypatch.setenv("ELSEWHERE_KEY", "sk-ours")
    await run(stand_in := StandIn(), **settings)
    [(_, headers, _)] = stand_in.asked
    made_here = {"host", "accept", "accept-encoding", "user-agent", "content-length", "content-type"}
    assert {name.lower() for name in headers} - made_here == ({"authorization"} if settings else set())
    if settings:
        assert {name.lower(): value for name, value in headers.items()}["authorization"] == "Bearer sk-ours"


async def test_only_what_is_understood_and_meant_for_it_is_sent() -> None:
    ours: dict[str, Any] = {
        **FIELDS,
        "max_tokens": 5,
        "max_completion_tokens": None,
        "seed": None,
        "user": "u",
        "store": True,
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "priority": 3,
        "verbosity": "medium",
        "prompt_cache_key": "k",
    }
    await run(stand_in := StandIn(), UpstreamCall("/chat/completions", ours, ["r"], 1, 5))
    [(_, _, body)] = stand_in.asked
    assert body == {
        "model": "ours",
        "messages": FIELDS["messages"],
        "top_k": 5,
        "prompt_cache_key": "k",
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


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


@pytest.mark.parametrize(
    "raw", [[BREAK], [b"what?\r\n\r\n"], [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"]], ids=range(3)
)
async def test_what_is_no_answer(raw: list[Item]) -> None:
    with pytest.raises(UpstreamDownError):
        await run(StandIn(raw=raw))


async def test_nobody_listens() -> None:
    async with StandIn().listening() as url:
        pass
    client = Upstream(config(base_url=url))
    with pytest.raises(UpstreamDownError):
        await answer(client)
    await client.close()


async def test_silence_before_the_first_token() -> None:
    for stand_in in (StandIn(silent=asyncio.Event()), StandIn([said(""), asyncio.Event()])):
        with pytest.raises(UpstreamSlowError):
            await run(stand_in, first_token_s=0.01)
        async with stand_in.upstream() as client:
            with pytest.raises(UpstreamSlowError):
                await client.begin(CALL, first_token_s=0.01)


async def test_silence_later() -> None:
    for stand_in in (StandIn(silent=asyncio.Event()), StandIn([said("x"), asyncio.Event()])):
        with pytest.raises(UpstreamSlowError):
            await run(stand_in, idle_s=0.05)


async def test_leaving_closes_the_connection() -> None:
    stand_in = StandIn([said("x"), asyncio.Event()])
    async with stand_in.upstream() as client:
        stream = await client.begin(CALL)
        assert (await anext(stream))[0].text == "x"
        stream.close()
        stream.close()
        await stand_in.left()


async def test_giving_up_before_the_answer_begins_closes_the_connection() -> None:
    stand_in = StandIn([said(""), asyncio.Event()])
    async with stand_in.upstream(max_connections=1) as client:
        beginning = asyncio.create_task(client.begin(CALL))
        while not stand_in.asked:
            await asyncio.sleep(0.001)
        beginning.cancel()
        await stand_in.left()
        stand_in.items = GOOD
        assert text(await answer(client)) == "one two"


async def test_a_connection_is_used_again_after_a_complete_answer() -> None:
    stand_in = StandIn()
    async with stand_in.upstream() as client:
        for _ in range(3):
            assert text(await answer(client)) == "one two"
        assert stand_in.connections == 1
        stand_in.items = [said("x"), asyncio.Event()]
        stream = await client.begin(CALL)
        stream.close()
        await stand_in.left()
        stand_in.items = GOOD
        assert text(await answer(client)) == "one two"
        assert stand_in.connections == 2
    await stand_in.left()


async def test_an_answer_that_does_not_end_after_done_gives_its_connection_up() -> None:
    stand_in = StandIn([*GOOD, asyncio.Event()])
    async with stand_in.upstream() as client:
        assert text(await answer(client)) == "one two"
        await stand_in.left()


async def test_no_more_connections_than_allowed() -> None:
    go_on = asyncio.Event()
    stand_in = StandIn([said("x"), go_on, said("", 0, "stop"), DONE])
    async with stand_in.upstream(max_connections=2, connect_s=1.0) as client:
        streams = [await client.begin(CALL) for _ in range(2)]
        with pytest.raises(UpstreamFullError, match="all 2 connections are in use"):
            await client.begin(CALL)
        with pytest.raises(UpstreamFullError):
            await client.begin(CALL, first_token_s=0.001)
        waiting = asyncio.create_task(answer(client))
        streams[0].close()
        go_on.set()
        assert text(await waiting) == "x" and stand_in.connections == 3
        streams[1].close()


async def test_what_comes_together_is_one_delta() -> None:
    whole = b"".join(item for item in GOOD if isinstance(item, bytes))
    async with StandIn([whole]).upstream() as client:
        batches = [deltas async for deltas in await client.begin(CALL)]
    assert [[delta.text for delta in deltas] for deltas in batches] == [["one two"], [""]]
    assert batches[0][0].num_completion_tokens == 2


async def test_tls_is_checked_against_the_named_authorities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    async with StandIn().listening(context) as url:
        distrusting = Upstream(config(base_url=url))
        with pytest.raises(UpstreamDownError, match="CERTIFICATE_VERIFY_FAILED"):
            await answer(distrusting)
        await distrusting.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(pair.cert))
        client = Upstream(config(base_url=url))
        assert text(await answer(client)) == "one two"
        await client.close()


async def test_proxies_of_the_environment_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    proxy = StandIn()
    async with proxy.listening() as url:
        for variable in ("http_proxy", "all_proxy"):
            with monkeypatch.context() as env:
                env.setenv(variable, url.removesuffix("/v1"))
                client = Upstream(config(base_url="http://inside.invalid/v1"))
                assert text(await answer(client)) == "one two"
                await client.close()
                env.setenv("no_proxy", "inside.invalid")
                direct = Upstream(config(base_url="http://inside.invalid/v1"))
                with pytest.raises(UpstreamDownError):
                    await answer(direct)
                await direct.close()
    assert [path for path, _, _ in proxy.asked] == ["http://inside.invalid/v1/chat/completions"] * 2


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_no_event_is_a_fault_of_ours(payload: bytes) -> None:
    with contextlib.suppress(UpstreamError):
        UpstreamAnswer(["r"], 2).read([payload])


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
    answer = UpstreamAnswer(["r"], 2)
    with contextlib.suppress(UpstreamError):
        answer.read([json.dumps({"choices": choices, "usage": usage}).encode()])
        answer.finish()

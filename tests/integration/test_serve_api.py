"""The demo model over real HTTP: the official SDK, the texts that are known to be right, many clients at once."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx
import openai
import pytest
from helpers_gateway import error_of
from helpers_server import CHAT, COMPLETIONS, COUNT, COUNT_24, KEY, MODEL, WAIT_S, Server, count, endless, events

pytestmark = pytest.mark.ray

OWLS = "\U0001f989" * 8
FOX = "The quick brown fox jumps over the lazy dog. "
# Greedy continuations of the demo model's weights in float32, each token far ahead of the next best.
KNOWN = {
    "COUNT": (COUNT, 24, COUNT_24),
    "COUNT20": ("Count: 20, 21, 22,", 10, " 23, 24, 2"),
    "COUNT50": ("Count: 50, 51, 52,", 10, " 53, 54, 5"),
    "COUNTDN": ("Count down: 9, 8, 7,", 10, " 6, 5, 4, "),
    "EMOJI": ("Repeat these emoji forever: " + OWLS, 24, OWLS),
    "FOX24": (FOX * 2 + "The quick brown fox", 5, " is a classic example of"),
    "FOX32": (FOX * 3 + "The end", 3, ".\n\n"),
}


def test_nothing_but_honest_answers_before_it_is_ready(server: Server) -> None:
    ready = [e for e in server.early if e.path == "/health/ready"]
    asked = [e for e in server.early if e.path == COMPLETIONS]
    assert {e.status for e in ready[:-1]} <= {0, 503} and ready[-1].status == 200
    # The last was sent after the first 200 from /health/ready; one before it may have come just in time.
    assert {e.status for e in asked[:-1]} <= {0, 503, 200} and asked[-1].status == 200
    assert all(COUNT_24 in e.text for e in asked if e.status == 200)
    refused = [e for e in asked if e.status == 503]
    assert refused, "the server was never asked while it loaded the model"
    for e in refused:
        assert int(e.retry_after or "0") >= 1
        assert json.loads(e.text)["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("name", KNOWN)
def test_known_texts(server: Server, name: str) -> None:
    prompt, n, text = KNOWN[name]
    with server.http() as http:
        ids = http.post("/tokenize", json={"model": MODEL, "prompt": prompt}).json()["tokens"]
    given = ids[:32] if name == "FOX32" else prompt
    ask: dict[str, Any] = {"model": MODEL, "prompt": given, "max_tokens": n, "temperature": 0}
    with server.sdk() as api:
        whole = api.completions.create(**ask)
        assert [(c.text, c.finish_reason) for c in whole.choices] == [(text, "length")]
        chunks = list(api.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    texts = [c.choices[0].text for c in chunks if c.choices]
    assert "".join(texts) == text and not any("\ufffd" in t for t in texts)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == n
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + n
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_sdk_models_and_chat(server: Server) -> None:
    ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
    with server.sdk() as api:
        assert [m.id for m in api.models.list().data] == [MODEL]
        assert api.models.retrieve(MODEL).id == MODEL
        whole = api.chat.completions.create(**ask)
        assert whole.usage is not None and whole.usage.prompt_tokens == 31
        said = whole.choices[0].message.content
        assert said and whole.system_fingerprint
        chunks = list(api.chat.completions.create(**ask, stream=True))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == said
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert all(c.usage is None for c in chunks)


def test_sdk_errors(server: Server) -> None:
    ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    with server.sdk() as api, server.sdk("sk-wrong") as stranger:
        with pytest.raises(openai.NotFoundError) as missing:
            api.chat.completions.create(**{**ask, "model": "nope"})
        assert missing.value.code == "model_not_found" and missing.value.request_id
        with pytest.raises(openai.BadRequestError) as bad:
            api.chat.completions.create(**ask, temperature=3)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as long:
            api.completions.create(model=MODEL, prompt="a " * 9000, max_tokens=1)
        assert long.value.code == "context_length_exceeded" and "8192" in long.value.message
        with pytest.raises(openai.AuthenticationError) as unknown:
            stranger.chat.completions.create(**ask)
        assert unknown.value.code == "invalid_api_key" and "sk-wrong" not in unknown.value.message


async def test_thirty_two_clients_at_once_each_get_their_own_answer(server: Server) -> None:
    names = [name for name in KNOWN if name.startswith("COUNT")]
    limits = httpx.Limits(max_connections=64)
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key=KEY,
        max_retries=0,
        timeout=WAIT_S,
        http_client=httpx.AsyncClient(trust_env=False, limits=limits),
    ) as api:

        async def one(i: int) -> str:
            prompt, n, _ = KNOWN[names[i % len(names)]]
            ask: Any = {"model": MODEL, "prompt": prompt, "max_tokens": n, "temperature": 0}
            if i % 8 < 4:
                return (await api.completions.create(**ask)).choices[0].text
            return "".join([c.choices[0].text async for c in await api.completions.create(**ask, stream=True)])

        texts = await asyncio.gather(*(one(i) for i in range(32)))
    assert texts == [KNOWN[names[i % len(names)]][2] for i in range(32)]


def test_choices_differ_and_a_seed_repeats_them(server: Server) -> None:
    ask: Any = count(n=4, temperature=1.2, seed=5)
    with server.sdk() as api:
        whole = api.completions.create(**ask)
        texts = [c.text for c in whole.choices]
        assert [c.index for c in whole.choices] == [0, 1, 2, 3] and len(set(texts)) > 1
        streamed, ends = [""] * 4, []
        for chunk in api.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
                ends += [choice.index] * (choice.finish_reason is not None)
        assert streamed == texts and sorted(ends) == [0, 1, 2, 3]
        assert chunk.usage is not None and whole.usage is not None
        assert chunk.usage.prompt_tokens == whole.usage.prompt_tokens == 14
        assert chunk.usage.completion_tokens == whole.usage.completion_tokens


def test_two_streams_under_one_request_id(server: Server) -> None:
    same = {"x-request-id": "the-same"}
    prompt, n, text = KNOWN["COUNT50"]
    ask = {"model": MODEL, "prompt": prompt, "max_tokens": n, "temperature": 0, "stream": True}
    with server.http() as http:
        with http.stream("POST", COMPLETIONS, json=endless(), headers=same) as slow:
            assert slow.headers["x-request-id"] == "the-same"
            lines = events(slow)
            next(lines)
            with http.stream("POST", COMPLETIONS, json=ask, headers=same) as quick:
                got = list(events(quick))
            assert "".join(json.loads(e)["choices"][0]["text"] for e in got[:-1]) == text and got[-1] == "[DONE]"
            assert json.loads(next(lines))["choices"]
            with http.stream("POST", COMPLETIONS, json=endless(), headers=same) as third:
                next(events(third))
            assert json.loads(next(lines))["choices"]  # the third has left; this one has not noticed
        server.until_idle()


def test_compressed_bodies(server: Server) -> None:
    body = json.dumps(count()).encode()
    with server.http() as http:

        def send(data: bytes, coding: str) -> httpx.Response:
            headers = {"content-type": "application/json", "content-encoding": coding}
            return http.post(COMPLETIONS, content=data, headers=headers)

        assert send(gzip.compress(body), "gzip").json()["choices"][0]["text"] == COUNT_24
        error_of(send(gzip.compress(body)[:-9], "gzip"), 400)
        error_of(send(body, "br"), 415)
        error_of(send(gzip.compress(b" " * 50_000_000), "gzip"), 413)


def test_headers_beyond_measure(server: Server) -> None:
    with server.http() as http:
        for headers in ({"x-big": "a" * 70_000}, {f"x-{i}": "a" for i in range(250)}):
            error_of(http.post(COMPLETIONS, json=count(), headers=headers), 431)
        answer = http.post(CHAT, json={}, headers={"x-request-id": "a" * 5000})
        error_of(answer, 400)
        assert answer.headers["x-request-id"].startswith("req_")

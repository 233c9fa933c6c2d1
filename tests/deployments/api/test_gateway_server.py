"""The gateway on real sockets: the official SDK, clients that leave, send too much or read in silence."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.parse
from typing import Any

import httpx
import openai
import pytest
from helpers_gateway import COUNT, COUNT_24, HI, MODEL, FakeBackend, error_of, events_of, serving

from deployments.config.gateway import GatewayConfig
from deployments.observe.request_log import RequestLog
from deployments.routing.errors import ReplicaLostError

pytestmark = pytest.mark.sockets

COMP, CHAT = "/v1/completions", "/v1/chat/completions"
KEY = "sk-tests-0123456789abcdef"
WAIT_S = 60.0
TYPED = {"content-type": "application/json"}


def sdk(base: str, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=base + "/v1", api_key=key, max_retries=0, timeout=WAIT_S, http_client=httpx.Client(trust_env=False)
    )


def test_openai_sdk() -> None:
    with serving(FakeBackend(), GatewayConfig(api_keys=(KEY,))) as base, sdk(base) as api:
        assert [m.id for m in api.models.list().data] == [MODEL]
        assert api.models.retrieve(MODEL).id == MODEL
        ask: Any = {"model": MODEL, "messages": HI, "max_tokens": 24, "n": 2, "logprobs": True, "top_logprobs": 2}
        whole = api.chat.completions.create(**ask)
        assert [c.message.content for c in whole.choices] == [COUNT_24] * 2
        assert whole.usage is not None and whole.usage.completion_tokens == 48
        assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
        assert len(whole.choices[0].logprobs.content) == 24
        texts, ends, usage = ["", ""], [], None
        for chunk in api.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends += [choice.finish_reason] * (choice.finish_reason is not None)
            usage = chunk.usage or usage
        assert (texts, ends) == ([COUNT_24] * 2, ["length"] * 2) and usage == whole.usage
        scored = api.completions.create(model=MODEL, prompt=COUNT, max_tokens=0, echo=True, logprobs=1).choices[0]
        assert scored.logprobs is not None and len(scored.logprobs.tokens or []) == 14
        extra = {"top_k": 3, "min_p": 0.1, "ignore_eos": True, "something_else": 1}
        assert api.completions.create(model=MODEL, prompt=COUNT, extra_body=extra).choices[0].finish_reason == "length"


def test_openai_sdk_errors() -> None:
    backend = FakeBackend()
    config = GatewayConfig(api_keys=(KEY,))
    ask: Any = {"model": MODEL, "messages": HI}
    with serving(backend, config) as base, sdk(base) as api, sdk(base, "sk-wrong") as stranger:
        with pytest.raises(openai.NotFoundError) as missing:
            api.chat.completions.create(**{**ask, "model": "nope"})
        assert missing.value.code == "model_not_found" and missing.value.request_id
        with pytest.raises(openai.BadRequestError) as bad:
            api.chat.completions.create(**ask, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError):
            stranger.chat.completions.create(**ask)
        backend.fail, backend.fail_at = ReplicaLostError(), 3
        with pytest.raises(openai.APIError, match="before it was complete"):
            list(api.chat.completions.create(**ask, stream=True))


def test_a_body_far_over_the_limit_is_answered_and_the_connection_lives() -> None:
    body = json.dumps({"model": MODEL, "prompt": COUNT}).encode()
    with serving(FakeBackend()) as base, httpx.Client(base_url=base, timeout=WAIT_S, trust_env=False) as http:
        headers = TYPED
        error_of(http.post(COMP, content=body + b" " * 40_000_000, headers=headers), 413)
        assert http.post(COMP, content=body, headers=headers).status_code == 200

        def chunks() -> Any:
            yield body
            for _ in range(160):
                yield b" " * 100_000

        error_of(http.post(COMP, content=chunks(), headers=headers), 413)
        assert http.post(COMP, content=body, headers=headers).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [0, 3])
def test_a_client_that_leaves_stops_the_work(stream: bool, step: int) -> None:
    reached = threading.Event()

    async def gate(now: int) -> None:
        if now == step:
            reached.set()
            await asyncio.Event().wait()

    backend = FakeBackend(gate=gate)
    finished: list[RequestLog] = []
    logged = threading.Event()

    def on_finished(record: RequestLog) -> None:
        finished.append(record)
        logged.set()

    body = json.dumps({"model": MODEL, "prompt": COUNT, "stream": stream, "n": 2}).encode()
    with serving(backend, on_finished=on_finished) as base:
        url = urllib.parse.urlsplit(base)
        with socket.create_connection((url.hostname, url.port), timeout=WAIT_S) as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            assert reached.wait(WAIT_S)
            assert not backend.ended.is_set()
        assert backend.ended.wait(WAIT_S)
        assert logged.wait(WAIT_S)
    assert finished[0].status == 499
    assert finished[0].completion_tokens == 2 * step


def test_silence_in_a_stream_is_filled_with_comments() -> None:
    go = threading.Event()

    async def gate(now: int) -> None:
        if now == 2:
            await asyncio.to_thread(go.wait, WAIT_S)

    ask = {"model": MODEL, "prompt": COUNT, "max_tokens": 24, "stream": True}
    with (
        serving(FakeBackend(gate=gate), GatewayConfig(keepalive_s=0.02)) as base,
        httpx.stream("POST", base + COMP, json=ask, timeout=WAIT_S, trust_env=False) as response,
    ):
        raw = b""
        for part in response.iter_raw():
            raw += part
            if raw.count(b": keep-alive\n\n") >= 2:
                go.set()
    assert go.is_set()
    events = events_of(raw)
    assert "".join(c["choices"][0]["text"] for c in events[:-1]) == COUNT_24 and events[-1] == "[DONE]"


def test_a_slow_body_is_408() -> None:
    with serving(FakeBackend(), GatewayConfig(body_timeout_s=0.05)) as base:
        url = urllib.parse.urlsplit(base)
        with socket.create_connection((url.hostname, url.port), timeout=WAIT_S) as sock:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            sock.sendall(head + b"Content-Length: 50\r\n\r\n{")
            with sock.makefile("rb") as reader:
                answer = reader.read()
    assert answer.startswith(b"HTTP/1.1 408") and b"connection: close" in answer


def test_the_loop_stays_free_while_bodies_are_read() -> None:
    """Big prompts are tokenized elsewhere: a small request gets through while they are."""
    big = json.dumps({"model": MODEL, "prompt": "The quick brown fox. " * 40_000, "max_tokens": 1})
    with serving(FakeBackend()) as base, httpx.Client(base_url=base, timeout=WAIT_S, trust_env=False) as http:
        answers: list[httpx.Response] = []

        def send() -> None:
            answers.append(httpx.post(base + COMP, content=big, headers=TYPED, timeout=WAIT_S, trust_env=False))

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert http.get("/health").status_code == 200
        for thread in threads:
            thread.join()
    assert all(error_of(answer, 400)["code"] == "context_length_exceeded" for answer in answers) and len(answers) == 4

"""Whatever is sent, the answer is an honest one: no 5xx, no hang, nothing left running, nothing given away."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import socket
import tracemalloc
import urllib.parse
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers_gateway import COUNT, COUNT_24_IDS, HI, LEAK, MODEL, FakeBackend, client, error_of, serving
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from deployments.api.request_types import ChatBody, CompletionBody, EmbeddingsBody, TokenizeBody
from deployments.config.gateway import GatewayConfig

CHAT, COMP = "/v1/chat/completions", "/v1/completions"
PATHS = (CHAT, COMP, "/tokenize", "/v1/embeddings")
WAIT_S = 60.0
CONFIG = GatewayConfig(max_body_bytes=256 * 1024)
FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=150)

# ------------------------------------------------------------------------------------------ what is sent
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", "\0", "\ud83d", "x\ude00", "<|im_start|>", "\u202e", "a" * 5000, "NaN", "../../etc/passwd", "%s%n"]
    ),
)
NUMBERS = st.one_of(
    st.integers(-3, 10),
    st.integers(),
    st.floats(),
    st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 1e308, 5e-324, -0.0, 0.1]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [name for kind in (ChatBody, CompletionBody, TokenizeBody, EmbeddingsBody) for name in kind.model_fields]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "x"])},
        optional={
            "content": st.one_of(TEXTS, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": VALUES}))),
            "name": VALUES,
            "tool_calls": st.lists(VALUES, max_size=2),
            "tool_call_id": TEXTS,
        },
    ),
    max_size=4,
)


@st.composite
def objects(draw: Any) -> dict[str, Any]:
    """A good body with a few fields that may be bad."""
    body = {"model": MODEL, "max_tokens": 3, **draw(st.sampled_from([{"messages": HI}, {"prompt": COUNT}, {}]))}
    if draw(st.booleans()):
        body["messages"] = draw(MESSAGES)
    return body | draw(st.dictionaries(st.one_of(FIELDS, FIELDS, TEXTS), VALUES, max_size=4))


@st.composite
def raws(draw: Any) -> bytes:
    """Bytes from nearly right to noise."""
    kind = draw(st.sampled_from(["json", "json", "cut", "spliced", "twice", "deep", "noise", "utf-16"]))
    text = json.dumps(draw(objects()))
    raw = text.encode()
    match kind:
        case "cut":
            return raw[: draw(st.integers(0, len(raw)))]
        case "spliced":
            at = draw(st.integers(0, len(raw)))
            return raw[:at] + draw(st.binary(max_size=8)) + raw[at:]
        case "twice":
            return raw[:-1] + b", " + raw[1:]
        case "deep":
            depth, (opens, closes) = draw(st.integers(1, 20_000)), draw(st.sampled_from(["[]", "{}"]))
            unit = opens + ('"a":' if opens == "{" else "")
            return (text[:-1] + ', "stop": ' + unit * depth + "1" + closes * depth + "}").encode()
        case "noise":
            return draw(st.binary(max_size=200))
        case "utf-16":
            return text.encode("utf-16")
    return raw


CODINGS = st.sampled_from(["identity", "gzip", "gzip", "GZIP", "br", "deflate", "gzip, gzip", "", "\xff"])
TYPES = st.sampled_from(
    ["application/json", "application/json", "application/json; charset=utf-8", "text/plain", "", ";"]
)
TOKENS = st.text(alphabet=st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12)
HEADER_VALUES = st.binary(max_size=60).map(lambda b: re.sub(rb"[\r\n\0]", b"?", b))
HEADERS = st.lists(st.tuples(TOKENS.map(str.encode), HEADER_VALUES), max_size=6)
OURS = st.sampled_from(
    [b"authorization", b"x-request-id", b"accept", b"accept-encoding", b"origin", b"cookie", b"expect"]
)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


def honest(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    assert 400 <= response.status_code < 500, response.text
    error_of(response, response.status_code)
    assert not LEAK.search(response.text)


# ------------------------------------------------------------------------------------------------- in process
@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_bodies(runner: asyncio.Runner, path: str) -> None:
    backend = FakeBackend(script=lambda request, index: COUNT_24_IDS[:3])
    http = client(backend, CONFIG)

    @FUZZ
    @given(raw=raws(), coding=CODINGS, kind=TYPES, squeeze=st.booleans())
    def check(raw: bytes, coding: str, kind: str, squeeze: bool) -> None:
        if squeeze and "gzip" in coding.lower():
            raw = gzip.compress(raw)
        headers = [(b"content-type", kind.encode()), (b"content-encoding", coding.encode("latin-1"))]
        honest(runner.run(http.post(path, content=raw, headers=headers)))
        assert backend.closed == len(backend.calls)

    check()
    runner.run(http.aclose())


def test_headers(runner: asyncio.Runner) -> None:
    backend = FakeBackend(script=lambda request, index: COUNT_24_IDS[:3])
    http = client(backend, GatewayConfig(api_keys=("sk-tests",)))
    body = json.dumps({"model": MODEL, "prompt": COUNT}).encode()

    @FUZZ
    @given(headers=HEADERS, ours=st.lists(st.tuples(OURS, HEADER_VALUES), max_size=3), good=st.booleans())
    def check(headers: list[tuple[bytes, bytes]], ours: list[tuple[bytes, bytes]], good: bool) -> None:
        if good:
            ours = [(k, v) for k, v in ours if k != b"authorization"] + [(b"authorization", b"Bearer sk-tests")]
        response = runner.run(http.post(COMP, content=body, headers=[*headers, *ours]))
        honest(response)
        assert response.status_code == (200 if good else 401)
        assert re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", response.headers["x-request-id"])
        assert backend.closed == len(backend.calls)

    check()
    runner.run(http.aclose())


@pytest.mark.parametrize("path", ["/v1/models/{}", "/{}", "/v1/{}", "/health/{}", "{}"])
def test_paths(runner: asyncio.Runner, path: str) -> None:
    http = client(FakeBackend())

    @settings(FUZZ, max_examples=40)
    @given(part=st.text(max_size=40), method=st.sampled_from(["GET", "POST", "DELETE", "OPTIONS", "TRACE", "X"]))
    def check(part: str, method: str) -> None:
        target = path.format(urllib.parse.quote(part.encode("utf-8", "surrogatepass"), safe="/%?#:;"))
        try:
            request = http.build_request(method, target)
        except httpx.InvalidURL:
            assume(False)
        if request.url.host == "gateway":
            honest(runner.run(http.send(request)))

    check()
    runner.run(http.aclose())


@pytest.mark.slow
def test_bombs_take_no_memory(runner: asyncio.Runner) -> None:
    squeeze = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(squeeze.compress(b" " * 16_000_000) for _ in range(10)) + squeeze.flush()
    limit = 8 * 1024 * 1024
    http = client(FakeBackend(), GatewayConfig(max_body_bytes=limit))
    tracemalloc.start()
    try:
        error_of(runner.run(http.post(COMP, content=bomb, headers={"content-encoding": "gzip"})), 413)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * limit
    runner.run(http.aclose())


# ------------------------------------------------------------------------------------------------- on a socket
GOOD = json.dumps({"model": MODEL, "prompt": COUNT, "max_tokens": 3}).encode()
TYPED = {"content-type": "application/json"}
LINES = st.sampled_from(
    [b"POST /v1/completions HTTP/1.1", b"GET /v1/models HTTP/1.1", b"POST /v1/completions HTTP/1.0", b"GET / HTTP/9.9",
     b"POST  /v1/completions HTTP/1.1", b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0"]
)  # fmt: skip
FRAMES = st.sampled_from(
    [b"Content-Length: %d" % len(GOOD), b"Content-Length: -1", b"Content-Length: 99999999999", b"Content-Length: +5",
     b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity",
     b"Expect: 100-continue", b"Upgrade: h2c\r\nConnection: Upgrade", b"Connection: close", b" folded", b"no colon",
     b"X: " + b"a" * 70_000, b"Content-Type: application/json", b"Host: x", b"X-\xff: \xfe"]
)  # fmt: skip
BODIES = st.sampled_from(
    [GOOD, b"", b'5\r\n{"a":\r\n0\r\n\r\n', b"zz\r\n", b"-1\r\n", b"ffffffffffffffffff\r\n", GOOD * 2]
)


@pytest.mark.sockets
def test_anything_on_a_socket() -> None:
    """Each conversation ends by the server's answer or by our closing it, and none harms the next."""
    backend = FakeBackend(script=lambda request, index: COUNT_24_IDS[:3])
    config = GatewayConfig(body_timeout_s=0.05)
    with serving(backend, config) as base:
        url = urllib.parse.urlsplit(base)

        @settings(FUZZ, max_examples=80)
        @given(line=LINES, head=st.lists(FRAMES, max_size=4), body=BODIES, noise=st.binary(max_size=8))
        def check(line: bytes, head: list[bytes], body: bytes, noise: bytes) -> None:
            with socket.create_connection((url.hostname, url.port), timeout=WAIT_S) as sock:
                answer = b""
                with contextlib.suppress(OSError):  # it may have heard enough
                    sock.sendall(b"\r\n".join([line, *head]) + b"\r\n\r\n" + body + noise)
                    sock.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    while part := sock.recv(65536):
                        answer += part
            assert not re.search(rb"HTTP/1\.1 5", answer), answer
            assert not LEAK.search(answer.decode("latin-1"))

        check()
        assert httpx.post(base + COMP, content=GOOD, headers=TYPED, timeout=WAIT_S, trust_env=False).status_code == 200
        assert backend.closed == len(backend.calls)

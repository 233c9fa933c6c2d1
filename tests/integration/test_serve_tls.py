"""HTTPS by the example config, with a certificate made here, as a client that checks it sees it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from helpers_server import CHAT, COMPLETIONS, KEY, MODEL, ROOT, SLUICE, WAIT_S, events, until
from helpers_tls import Pair, self_signed

from deployments.cli.local_ray import free_port
from load_tests.processes import end_with_parent
from load_tests.stand_in import STAND_IN

pytestmark = pytest.mark.ray

ASK = {"model": MODEL, "prompt": "Count:", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def base(pair: Pair) -> Iterator[str]:
    """The address that the ready line says. The engine computes nothing: this is about what is around it."""
    port = free_port()
    settings = {"http.ssl_certfile": pair.cert, "http.ssl_keyfile": pair.key, "engine.executor": STAND_IN}
    settings |= {"engine.executor_options.step_ms": 20, "gateway.send_timeout_s": 1, "gateway.public_metrics": "true"}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [*SLUICE, "serve", "--config", "cluster_configs/tls.yaml", "--port", str(port), *sets]
    log = pair.cert.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True, preexec_fn=end_with_parent
        )
    try:

        def ready() -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()
            return re.search(r"^ready (\S+)", log.read_text(), re.MULTILINE)

        yield until(ready, "ready line")[1]
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(WAIT_S)
        process.kill()
        process.wait()


def client(base: str, pair: Pair) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(pair.cert))
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.Client(base_url=base, verify=context, headers=headers, timeout=WAIT_S, trust_env=False)


def test_https_is_what_the_ready_line_says_and_what_is_served(base: str, pair: Pair) -> None:
    assert base.startswith("https://127.0.0.1:")
    with client(base, pair) as http:
        answer = http.post(COMPLETIONS, json=ASK)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        with http.stream("POST", CHAT, json=_chat(stream=True)) as streamed:
            assert [*events(streamed)][-1] == "[DONE]"
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"{base}/health", trust_env=False, timeout=WAIT_S)
    with pytest.raises(httpx.HTTPError):
        httpx.get(base.replace("https", "http") + "/health", trust_env=False, timeout=WAIT_S)


def test_the_sdk(base: str, pair: Pair) -> None:
    with client(base, pair) as http:
        api = openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0, http_client=http)
        assert api.chat.completions.create(**_chat()).choices[0].finish_reason == "length"


def test_connections_are_kept_and_request_ids_given_back(base: str, pair: Pair) -> None:
    opened = []
    with client(base, pair) as http:
        for i in range(3):
            stream = http.stream(
                "POST", COMPLETIONS, json=ASK, headers={"x-request-id": f"id-{i}"},
                extensions={"trace": lambda name, _: opened.append(name)},
            )  # fmt: skip
            with stream as answer:
                answer.read()
            assert answer.headers.get_list("x-request-id") == [f"id-{i}"]
    assert opened.count("connection.connect_tcp.complete") == 1


def test_a_client_that_reads_nothing_loses_its_seat(base: str, pair: Pair) -> None:
    """Its answer is far larger than all the buffers on the way."""
    body = json.dumps(ASK | {"prompt": ["a"] * 60, "n": 8, "logprobs": 5, "max_tokens": 4000, "stream": True}).encode()
    url = httpx.URL(base)
    context = ssl.create_default_context(cafile=str(pair.cert))
    with (
        socket.create_connection((url.host, url.port or 0)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as sock,
        client(base, pair) as http,
    ):

        def total(name: str) -> float:
            found = re.findall(rf"^sluicegate_{name}\S* (\S+)", http.get("/metrics").text, re.MULTILINE)
            return sum(map(float, found))

        aborted = 'requests_total{finished_reason="abort"'
        before = total(aborted)

        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}"
        sock.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body)
        until(lambda: total(aborted) > before, "end of it")
        until(lambda: not total("requests_running") + total("requests_waiting"), "free seats")


def _chat(**more: object) -> Any:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8, "extra_body": {"ignore_eos": True}, **more}

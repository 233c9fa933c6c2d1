"""The example configs for nginx and HAProxy with the real programs: HTTP/2 and TLS outside, tokens as they come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers_front import KINDS, WAIT_S, front
from helpers_gateway import COUNT, COUNT_24, MODEL, FakeBackend, events_of, serving

from deployments.config.gateway import GatewayConfig

pytestmark = pytest.mark.sockets

COMP = "/v1/completions"
BODY = json.dumps({"model": MODEL, "prompt": COUNT, "max_tokens": 24, "stream": True})


def curl_has_http2() -> bool:
    if shutil.which("curl") is None:
        return False
    return "HTTP2" in subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout


@dataclass
class Fronted:
    """A front over a gateway, and how to call it."""

    base: str
    backend: FakeBackend
    cert: Path

    def curl(self, *more: str, path: str = COMP) -> subprocess.Popen[bytes]:
        command = [
            "curl",
            "-sS",
            "-N",
            "--http2",
            "-H",
            "content-type: application/json",
            "--cacert",
            str(self.cert),
            "--max-time",
            str(WAIT_S),
            *more,
        ]
        return subprocess.Popen([*command, self.base + path], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@contextlib.contextmanager
def fronted(kind: str, folder: Path, backend: FakeBackend, config: GatewayConfig | None = None) -> Iterator[Fronted]:
    if not curl_has_http2():
        pytest.skip("no curl that speaks HTTP/2 is installed")
    with serving(backend, config) as upstream, front(kind, folder, upstream) as (base, cert):
        yield Fronted(base, backend, cert)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_tokens_come_one_by_one_over_http2(kind: str, tmp_path: Path) -> None:
    """The next step waits until the client has seen the one before it: anything buffered on the way would hang."""
    seen = threading.Semaphore(1)

    async def gate(step: int) -> None:
        assert await asyncio.to_thread(seen.acquire, True, WAIT_S)

    with fronted(kind, tmp_path, FakeBackend(gate=gate)) as front:
        with front.curl("-D", str(tmp_path / "head"), "-H", "X-Request-Id: mine-1", "-d", BODY) as curl:
            assert curl.stdout is not None
            raw = b""
            for line in curl.stdout:
                raw += line
                if line.startswith(b"data: "):
                    seen.release()
        assert curl.returncode == 0
        head = (tmp_path / "head").read_text()
    assert head.startswith("HTTP/2 200") and "x-request-id: mine-1" in head.lower()
    assert "".join(c["choices"][0]["text"] for c in events_of(raw)[:-1]) == COUNT_24


def test_a_client_that_leaves_is_gone_behind_the_front(kind: str, tmp_path: Path) -> None:
    reached = threading.Event()

    async def gate(step: int) -> None:
        if step == 2:
            reached.set()
            await asyncio.Event().wait()

    backend = FakeBackend(gate=gate)
    with fronted(kind, tmp_path, backend) as front, front.curl("-d", BODY) as curl:
        assert reached.wait(WAIT_S)
        assert not backend.ended.is_set()
        curl.kill()
        assert backend.ended.wait(WAIT_S)


def test_errors_ids_and_sizes(kind: str, tmp_path: Path) -> None:
    def answer(front: Fronted, *more: str) -> tuple[int, bytes, str]:
        with front.curl("-D", str(tmp_path / "head"), *more) as curl:
            assert curl.stdout is not None
            body = curl.stdout.read()
        head = (tmp_path / "head").read_text()
        return int(head.split()[1]), body, head.lower()

    large = tmp_path / "large"
    large.write_bytes(b" " * 9_000_000)
    with fronted(kind, tmp_path, FakeBackend(), GatewayConfig(api_keys=("sk-tests",))) as front:
        status, body, head = answer(front, "-d", BODY, "-H", "X-Request-Id: not harmless;")
        assert status == 401 and json.loads(body)["error"]["code"] is None
        made = head.partition("x-request-id: ")[2].split()[0]
        assert "harmless" not in made and not made.startswith("req_")  # the front's, which it also logs
        status, body, head = answer(front, "-d", BODY, "-H", "Authorization: Bearer sk-tests")
        assert status == 200 and body.endswith(b"data: [DONE]\n\n")
        assert answer(front, "--data-binary", f"@{large}", "-H", "Authorization: Bearer sk-tests")[0] == 413

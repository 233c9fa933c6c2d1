"""How `sluice serve` ends: on a signal, at once when it cannot start, and never with anything left behind."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from helpers_gateway import error_of
from helpers_server import COMPLETIONS, ROOT, SLUICE, WAIT_S, Server, alive, count, endless, events, until

pytestmark = pytest.mark.ray

CONFIG = "cluster_configs/local-cpu.yaml"


class Streams:
    """Some streams that run while the server is told to stop."""

    def __init__(self, server: Server, pool: ThreadPoolExecutor, number: int, max_tokens: int) -> None:
        begun = threading.Barrier(number + 1)

        def one() -> list[str]:
            got = []
            body = endless() | {"max_tokens": max_tokens}
            with server.http() as http, http.stream("POST", COMPLETIONS, json=body) as response:
                try:
                    assert response.status_code == 200
                    for event in events(response):
                        got.append(event)
                        if len(got) == 3:
                            begun.wait(WAIT_S)
                finally:
                    if len(got) < 3:
                        begun.abort()
            return got

        self._running = [pool.submit(one) for _ in range(number)]
        begun.wait(WAIT_S)

    def results(self) -> list[list[str]]:
        return [stream.result() for stream in self._running]


def test_running_streams_end_well_and_new_requests_are_sent_away(server: Server) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        Streams(server, pool, 3, max_tokens=50).results()
    # Long enough for requests to arrive meanwhile, and far below the limit, on slow and busy machines too.
    max_tokens = min(max(300, int(50 / (time.monotonic() - began) * 8.0)), 5000)
    pids = server.processes()
    temp = Path(server.output().partition("logs ")[2].partition("/session")[0])
    assert temp.is_dir()
    with ThreadPoolExecutor(8) as pool, server.http() as http:
        streams = Streams(server, pool, 3, max_tokens)
        server.terminate()
        until(lambda: not server.ready(), "503 from /health/ready")
        refused = 0
        while server.process.poll() is None:
            try:
                answer = http.post(COMPLETIONS, json=count())
            except httpx.TransportError:
                break  # nobody listens any more
            assert error_of(answer, 503)["type"] == "service_unavailable_error"
            assert int(answer.headers["retry-after"]) >= 1
            refused += 1
        assert refused
        for got in streams.results():
            *_, last, done = got
            assert json.loads(last)["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
    assert server.wait() == 0
    assert "Traceback" not in server.output()
    assert not alive(pids) and not temp.exists()


def test_over_the_limit_streams_end_with_an_error(tight: Server) -> None:
    tight.until_idle()
    pids = tight.processes()
    with ThreadPoolExecutor(8) as pool:
        streams = Streams(tight, pool, 4, max_tokens=1500)  # mostly in turns: the pool has room for one
        tight.terminate()
        for got in streams.results():
            assert "error" in json.loads(got[-1]) and "[DONE]" not in got
    assert tight.wait() == 0
    assert "running requests get 2 s" in tight.output()
    assert not alive(pids)


def test_a_model_that_does_not_load_is_one_line(tmp_path: Path, demo_model: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(demo_model.read_bytes()[:-4096])
    done = sluice("serve", str(cut), "--port", "0")
    assert done.returncode == 1
    assert done.stderr.startswith("sluice serve: ") and done.stderr.count("\n") == 1
    assert "cut.gguf" in done.stderr and "tensor" in done.stderr
    assert "ready" not in done.stdout


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--config", "{bad}"], ":2:13: "),
        (["--config", CONFIG, "--set", "engine.max_num_seqs=many"], "--set engine.max_num_seqs: "),
        (["--config", CONFIG, "--set", "engine.max_num_seq=4"], "did you mean max_num_seqs?"),
        (["--config", CONFIG, "--set", "engine.num_kv_blocks=-1"], "--set engine.num_kv_blocks: "),
        (["{gguf}", "--set", "gateway.api_keys=[env:SLUICE_TEST_UNSET]"], "SLUICE_TEST_UNSET"),
        (["{gguf}", "--port", "99999"], "99999"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value[-1:]),
)
def test_mistakes_are_one_line_before_anything_starts(
    args: list[str], line: str, tmp_path: Path, demo_model: Path
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("applications:\n  - {name: [}\n")
    done = sluice("serve", *(a.format(bad=bad, gguf=demo_model) for a in args))
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("sluice serve: ") and done.stderr.count("\n") == 1
    assert line in done.stderr


def sluice(*args: str) -> subprocess.CompletedProcess[str]:
    """Returns when all that holds its output has ended, not just the process itself."""
    return subprocess.run([*SLUICE, *args], cwd=ROOT, capture_output=True, text=True, timeout=3 * WAIT_S)

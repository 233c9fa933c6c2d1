"""The parts of the graph's measurement that need no server."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from deployments.cli.processes import command, descendants
from load_tests.errors import LoadError
from load_tests.graph_cost import ROLES, Level, parse, table
from load_tests.processes import CpuMeter, cpu_s

HEAD = b"HTTP/1.1 200 OK\r\nserver-timing: body;dur=1.00, engine;dur=9.00, queue;dur=2.00, prefill;dur=5.00\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_an_answer_is_taken_apart() -> None:
    first, second = chunk(b"data: {1}\n\n"), chunk(b"data: {2}\n\ndata: {3}\n\n")
    last = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    answer = parse(1.0, [(1.010, HEAD + first), (1.020, second[:4]), (1.030, second[4:]), (1.060, last)])
    assert answer.ttft_s == pytest.approx(0.010)
    assert answer.engine_s == pytest.approx(0.007)
    assert answer.pieces == 3
    assert answer.gaps_s == pytest.approx((0.020, 0.030))


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 503 Busy\r\n\r\n{}", HEAD + chunk(b"data: {1}\n\n")])
def test_what_is_no_complete_answer_is_an_error(raw: bytes) -> None:
    with pytest.raises(LoadError, match="not a complete stream"):
        parse(0.0, [(0.1, raw)])


def test_the_table_has_a_column_for_each_process() -> None:
    us = {"proxy": 40.2, "gateway": 50.0, "router": 0.0, "replica": 30.0, "other": 9.0}
    level = Level(64, "serve", 256, 4.0, 9.0, 120.0, 150.0, 3.2, dict.fromkeys(us, 1000.0), us, 210.4)
    head, row = table([level]).splitlines()
    assert head.split()[-7:] == ["proxy", "gateway", "router", "replica", "other", "us/token,", "all"]
    assert row.split()[-8:] == ["5000", "129", "40", "50", "0", "30", "9", "210"]


def work(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(b"\n")
    child.stdin.flush()
    child.stdout.readline()


@pytest.mark.sockets
def test_cpu_time_is_counted_by_role() -> None:
    code = "import sys\nwhile sys.stdin.readline(): sum(range(3_000_000)); print(flush=True)"
    children = [
        subprocess.Popen([sys.executable, "-c", code, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for name in ("a:Gateway", "unnamed")
    ]
    try:
        pids = [child.pid for child in children]
        for child in children:
            while cpu_s(child.pid) == 0 or not command(child.pid):
                work(child)
        assert "a:Gateway" in command(pids[0])
        assert set(pids) <= set(descendants(os.getpid()))
        meter = CpuMeter(pids, ROLES)
        for _ in range(3):
            work(children[0])
        spent = meter.read()
        assert spent["gateway"] > 0.02
        assert spent["other"] < spent["gateway"]
    finally:
        for child in children:
            child.communicate()
    assert command(pids[0]) == "" and cpu_s(pids[0]) == 0.0

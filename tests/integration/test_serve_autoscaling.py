"""More load than one replica can take: a second one is started, serves, and leaves again without losing a stream."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers_server import COMPLETIONS, Server, count, events, until

from load_tests.stand_in import STAND_IN

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SLO_S = 1.0
RATE = 2.4  # requests a second, of which each is half a second of work
PROMPT = [9] * 100
SETTINGS = (
    f"engine.executor={STAND_IN}",
    "engine.executor_options={base_s: 0.01, prefill_token_s: 0.005, decode_seq_s: 0.0005}",
    f"autoscaling.params={{ttft_slo_s: {SLO_S}, startup_s: 5}}",
    "autoscaling.guardrails={downscale_window_s: 10, downscale_cooldown_s: 3, panic_s: 5}",
    "engine.enable_prefix_caching=false",
    "engine.max_num_batched_tokens=64",  # steps of a third of a second at most: signals are as old as a step
    "max_queue_s=null",
)


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("elastic") / "server.log"
    with Server.running(log, *SETTINGS, config="cluster_configs/autoscale.yaml") as server:
        yield server


class Load:
    """Requests at RATE, whatever becomes of them, until stopped. `ttft_s` in the order in which they were sent."""

    def __init__(self, server: Server) -> None:
        self._http = server.http()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(256)
        self._thread = threading.Thread(target=self._send, daemon=True)
        self.ttft_s: list[Future[float]] = []
        self._thread.start()

    def stop(self) -> list[float]:
        self._stop.set()
        self._thread.join()
        try:
            return [future.result() for future in self.ttft_s]
        finally:
            self._http.close()

    def latest(self, n: int) -> list[float]:
        """Of those that have been answered."""
        return [future.result() for future in list(self.ttft_s) if future.done()][-n:]

    def _send(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due += 1 / RATE
            self.ttft_s.append(self._pool.submit(self._one))

    def _one(self) -> float:
        began = time.monotonic()
        ttft_s, last = None, ""
        with self._http.stream("POST", COMPLETIONS, json=count(prompt=PROMPT, max_tokens=4, stream=True)) as response:
            for event in events(response):
                last = event
                if ttft_s is None:
                    ttft_s = time.monotonic() - began
        assert last == "[DONE]" and ttft_s is not None
        return ttft_s


def decisions(server: Server) -> list[dict[str, Any]]:
    found = re.search(r"^logs (\S+)", server.output(), re.MULTILINE)
    assert found
    files = list(Path(found[1]).glob("autoscaling_*.log"))
    lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half written


def served(server: Server) -> int:
    """Replicas that have given a first token."""
    samples = [s for s in server.metrics().samples if s.name == "sluicegate_ttft_seconds_count" and s.value]
    return len({s.labels["replica"] for s in samples})


def test_up_with_the_load_and_down_after_it_without_losing_a_stream(elastic: Server) -> None:
    assert len(elastic.processes("ModelReplica")) == 1
    load = Load(elastic)
    until(lambda: [d for d in decisions(elastic) if d["from"] == 1 and d["to"] == 2], "decision to scale up")
    until(lambda: served(elastic) == 2, "second replica that serves", 180)
    until(lambda: len(last := load.latest(6)) == 6 and max(last) < SLO_S, "time to first token within the SLO", 180)
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(long_stream, elastic) for _ in range(4)]
        ttft_s = load.stop()
        assert ttft_s and all(ttft_s)
        until(lambda: decisions(elastic)[-1]["to"] == 1, "decision to scale down", 180)
        assert [stream.result() for stream in streams] == [LONG] * 4
    until(lambda: len(elastic.processes("ModelReplica")) == 1, "one replica less")

    made = decisions(elastic)
    up = next(d for d in made if d["to"] > d["from"])
    assert up["why"] in ("backlog", "work", "forecast") and up["fault"] is None
    assert up["signals"]["arrival_rate"] > 0 and up["terms"]["demand"] > 0
    moves = [d["to"] - d["from"] for d in made if d["to"] != d["from"]]
    directions = [m > 0 for m in moves]
    assert directions[0] and not directions[-1]
    assert sum(a != b for a, b in pairwise(directions)) == 1
    assert not [d for d in made if d["fault"]]


LONG = 2000


def long_stream(server: Server) -> int:
    """The number of tokens it got, if it ended as it should."""
    body = count(max_tokens=LONG, ignore_eos=True, stream=True, stream_options={"include_usage": True})
    with server.http() as http, http.stream("POST", COMPLETIONS, json=body) as response:
        got = list(events(response))
    assert got[-1] == "[DONE]"
    usage: dict[str, int] = json.loads(got[-2])["usage"]
    return usage["completion_tokens"]

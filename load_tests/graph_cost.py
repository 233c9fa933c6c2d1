"""python -m load_tests.graph_cost: what the graph itself costs, with an engine that computes nothing.

Starts `sluice serve` with the executor of `load_tests.stand_in`, whose steps sleep, and streams from it. Added TTFT:
what the client waited beyond the engine's own queue and prefill time, which the answer's Server-Timing header tells.
CPU: user and system time of the server's processes, the replica's with all of the engine but its steps, less what
they spend idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from autoscaling.report.tables import text_table
from deployments.cli.local_ray import free_port
from deployments.cli.processes import descendants
from load_tests.errors import LoadError
from load_tests.peers.demo import MODEL
from load_tests.processes import CpuMeter
from load_tests.servers import Launch, serving, sluice_serve
from load_tests.stand_in import STAND_IN

ROLES = {
    "haproxy": "haproxy -",
    "proxy": "ProxyActor",
    "haproxy manager": "HAProxy",
    "gateway": ":Gateway",
    "router": ":ModelRouter",
    "replica": ":ModelReplica",
}
"""Part of a process's title -> its place in the graph. What is left is Ray's own."""

_WAYS = {"haproxy": "1", "serve": "0"}  # what takes requests in, and Ray's switch for it
_TOKENS = 64
_LONG = 256
_STEP_MS = 30.0
_REQUESTS = (4, 256)  # answers of _TOKENS: the most of one stream after another, and about how many in all
_RAMP_S = 1.0  # short, lest it be measured with fewer streams; long enough to bring answers out of step
_IDLE_S = 5.0
_TIMING = re.compile(rb"(\w+);dur=([\d.]+)")


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """One streamed answer. `ttft_s`: sent -> first event. `engine_s`: the part of it that was the engine's. `gaps_s`:
    between two pieces, as they came. `pieces`: HTTP chunks."""

    ttft_s: float
    engine_s: float
    pieces: int
    gaps_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Level:
    """One number of streams. CPU in microseconds by process: an answer costs `request_us` and for each of its tokens
    `token_us`, as answers of 64 and of 256 tokens tell; `amortized_us` is all of an answer of 64, a token. `gap`:
    between pieces, as they came."""

    streams: int
    way: str
    requests: int
    added_ttft_p50_ms: float
    added_ttft_p95_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    tokens_per_piece: float
    request_us: dict[str, float]
    token_us: dict[str, float]
    amortized_us: float


class _Stream(asyncio.Protocol):
    """One connection, one request, one answer: what came and when."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.arrivals: list[tuple[float, bytes]] = []
        self.sent = 0.0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.arrivals.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)


def parse(sent: float, arrivals: Sequence[tuple[float, bytes]]) -> StreamTimes:
    """Raises LoadError for anything but a complete event stream."""
    raw = b"".join(data for _, data in arrivals)
    head, _, body = raw.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0] or b"data: [DONE]" not in body:
        raise LoadError(f"not a complete stream: {raw[:300]!r} ... {raw[-100:]!r}")
    timing = next((line for line in head.split(b"\r\n") if line.lower().startswith(b"server-timing:")), b"")
    parts = {name: float(ms) / 1000 for name, ms in _TIMING.findall(timing)}
    pieces = 0
    while size := int(body.partition(b"\r\n")[0], 16):
        body = body.partition(b"\r\n")[2][size + 2 :]
        pieces += 1
    times = [at for at, data in arrivals if b"data: " in data]
    gaps = tuple(b - a for a, b in pairwise(times))
    return StreamTimes(times[0] - sent, parts[b"queue"] + parts[b"prefill"], pieces, gaps)


async def _ask(port: int, request: bytes) -> StreamTimes:
    _, stream = await asyncio.get_running_loop().create_connection(lambda: _Stream(request), "127.0.0.1", port)
    await stream.closed
    return parse(stream.sent, stream.arrivals)


async def _drive(port: int, streams: int, requests: int, num_tokens: int) -> list[StreamTimes]:
    """`streams` at a time, each `requests` one after another, begun within _RAMP_S of each other."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Tell me about the sea, the sky and the mountains. " * 4}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\nConnection: close"
    request = head.encode() + b"\r\nContent-Type: application/json\r\n\r\n" + data
    draw = random.Random(streams)

    async def one(delay_s: float) -> list[StreamTimes]:
        await asyncio.sleep(delay_s)
        return [await _ask(port, request) for _ in range(requests)]

    delays = [draw.uniform(0, _RAMP_S) for _ in range(streams)]
    return [answer for answers in await asyncio.gather(*map(one, delays)) for answer in answers]


def measure(port: int, pid: int, streams: int, way: str, rounds: int) -> Level:
    """Against the running server `pid`. CPU: the medians of the rounds."""
    asyncio.run(_drive(port, min(streams, 16), 1, _TOKENS))
    pids = descendants(pid)
    idle = CpuMeter(pids, ROLES)
    time.sleep(_IDLE_S)
    idle_per_s = {role: s / _IDLE_S for role, s in idle.read().items()}

    def spend(num_tokens: int, requests: int) -> tuple[list[StreamTimes], dict[str, float]]:
        """The answers, and the CPU microseconds of one by process."""
        meter, began = CpuMeter(pids, ROLES), time.perf_counter()
        answers = asyncio.run(_drive(port, streams, requests, num_tokens))
        wall_s = time.perf_counter() - began
        each = 1e6 / len(answers)
        return answers, {role: (s - idle_per_s[role] * wall_s) * each for role, s in meter.read().items()}

    most, about = _REQUESTS
    requests = max(4, min(most, about // streams))
    answers: list[StreamTimes] = []
    shorts, longs = [], []
    for _ in range(rounds):
        some, cpu_us = spend(_TOKENS, requests)
        answers += some
        shorts.append(cpu_us)
        longs.append(spend(_LONG, requests // 4)[1])
    short, long = _medians(shorts), _medians(longs)
    token_us = {role: (long[role] - short[role]) / (_LONG - _TOKENS) for role in long}
    added = np.percentile([(a.ttft_s - a.engine_s) * 1000 for a in answers], (50, 95)).round(2)
    gaps = np.percentile([gap * 1000 for a in answers for gap in a.gaps_s], (50, 99)).round(2)
    return Level(
        streams=streams,
        way=way,
        requests=len(answers),
        added_ttft_p50_ms=float(added[0]),
        added_ttft_p95_ms=float(added[1]),
        gap_p50_ms=float(gaps[0]),
        gap_p99_ms=float(gaps[1]),
        tokens_per_piece=round(_TOKENS * len(answers) / sum(a.pieces for a in answers), 2),
        request_us={role: round(short[role] - _TOKENS * us, 1) for role, us in token_us.items()},
        token_us={role: round(us, 1) for role, us in token_us.items()},
        amortized_us=round(sum(short.values()) / _TOKENS, 1),
    )


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {role: statistics.median(r[role] for r in rounds) for role in rounds[0]}


def _launch(way: str, port: int) -> Launch:
    settings = {"executor": STAND_IN, "executor_options.step_ms": _STEP_MS, "max_num_seqs": 256}
    sets = [f"engine.{key}={value}" for key, value in settings.items()]
    return sluice_serve(MODEL, port, sets, {"RAY_SERVE_ENABLE_HA_PROXY": _WAYS[way]})


def table(levels: Sequence[Level]) -> str:
    roles = [role for role in (*ROLES, "other") if any(role in level.token_us for level in levels)]
    head = ["streams", "way in", "added TTFT p50/p95 ms", "gap p50/p99 ms", "tokens/piece", "us/request"]
    head += ["us/token", *roles, "us/token, all"]
    rows = [
        [
            str(level.streams),
            level.way,
            f"{level.added_ttft_p50_ms:.1f} / {level.added_ttft_p95_ms:.1f}",
            f"{level.gap_p50_ms:.1f} / {level.gap_p99_ms:.1f}",
            f"{level.tokens_per_piece:.2f}",
            f"{sum(level.request_us.values()):.0f}",
            f"{sum(level.token_us.values()):.0f}",
            *(f"{level.token_us.get(role, 0.0):.0f}" for role in roles),
            f"{level.amortized_us:.0f}",
        ]
        for level in levels
    ]
    return text_table(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m load_tests.graph_cost", description=(__doc__ or "").split("\n")[0])
    p.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256], metavar="N")
    p.add_argument("--ways", nargs="+", default=["haproxy"], choices=_WAYS, help="what takes requests in")
    p.add_argument("--rounds", type=int, default=3, help="of each number of streams (default: %(default)s)")
    p.add_argument("--out", type=Path, metavar="FILE", help="write the figures there as JSON")
    args = p.parse_args(argv)
    levels: list[Level] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for way in args.ways:
                port = free_port()
                with serving(_launch(way, port), Path(folder) / "serve.log") as pid:
                    for streams in args.streams:
                        print(f"{streams} streams, {way}", file=sys.stderr, flush=True)
                        levels.append(measure(port, pid, streams, way, args.rounds))
    except LoadError as error:
        print(f"load_tests.graph_cost: {error}", file=sys.stderr)
        return 1
    print(table(levels))
    if args.out is not None:
        args.out.write_text(json.dumps([asdict(level) for level in levels], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The load on one running target, and what came of it."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from dataclasses import dataclass

import httpx

from deployments.cli.processes import descendants
from load_tests.errors import LoadError
from load_tests.gateways.question import HEADERS, PATH, body, http
from load_tests.http1 import Origin
from load_tests.processes import CpuMeter

_WARM = 20
_TIMING = re.compile(r"(\w+);dur=([\d.]+)")
_NOT_OURS = {"engine", "queue", "prefill"}
_ROLES = {"gateway": ":Gateway"}


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is asked: requests one after another, and for how long `concurrency` at a time."""

    alone: int
    loaded_s: float
    concurrency: int = 32


FULL, QUICK = Effort(250, 5.0), Effort(40, 2.0)


@dataclass(frozen=True, slots=True)
class GatewayFigures:
    """One kind of answer from one target. Latency: sent until the whole answer is there, one request at a time.
    `pieces`: reads in which the client got an answer's body. `failed`: answers that were not 200."""

    latency_p50_ms: float
    latency_p95_ms: float
    first_p50_ms: float
    pieces: float
    requests_per_s: float
    failed: int


@dataclass(frozen=True, slots=True)
class Work:
    """A Sluicegate gateway's own part of a plain request, in milliseconds. `steps`: medians of Server-Timing's parts up
    to the engine; `before_engine_p50` of their sum. `cpu`: of its process under load, per request, answer included."""

    steps: dict[str, float]
    before_engine_p50: float
    cpu: float


def measure(port: int, stream: bool, effort: Effort) -> GatewayFigures:
    """Raises LoadError when nothing succeeds."""
    return asyncio.run(_measure(port, http(port, stream), effort))


async def _measure(port: int, data: bytes, effort: Effort) -> GatewayFigures:
    origin = Origin(f"http://127.0.0.1:{port}")
    try:
        for _ in range(_WARM):
            await _ask(origin, data)
        alone = [await _ask(origin, data) for _ in range(effort.alone)]
        loaded, took_s = await _loaded(origin, data, effort)
    finally:
        origin.close()
    good = [answer for answer in alone if answer.ok]
    if not good or not any(answer.ok for answer in loaded):
        raise LoadError("no request succeeds")
    whole = sorted(answer.whole_s * 1000 for answer in good)
    return GatewayFigures(
        latency_p50_ms=round(statistics.median(whole), 2),
        latency_p95_ms=round(whole[min(len(whole) - 1, int(len(whole) * 0.95))], 2),
        first_p50_ms=round(statistics.median(answer.first_s * 1000 for answer in good), 2),
        pieces=round(statistics.fmean(answer.pieces for answer in good), 1),
        requests_per_s=round(sum(answer.ok for answer in loaded) / took_s, 1),
        failed=sum(not answer.ok for answer in (*alone, *loaded)),
    )


@dataclass(slots=True)
class _AnswerTimes:
    ok: bool = False
    pieces: int = 0
    first_s: float = 0.0
    whole_s: float = 0.0


async def _ask(origin: Origin, data: bytes) -> _AnswerTimes:
    answer = _AnswerTimes()
    began = time.perf_counter()

    def receive(status: int, piece: bytes, at: float) -> None:
        answer.ok = status == 200
        answer.pieces += 1
        answer.first_s = answer.first_s or at - began

    try:
        await origin.request(data, receive)
    except OSError:
        answer.ok = False
    answer.whole_s = time.perf_counter() - began
    return answer


async def _loaded(origin: Origin, data: bytes, effort: Effort) -> tuple[list[_AnswerTimes], float]:
    answers: list[_AnswerTimes] = []
    began = time.perf_counter()
    until = began + effort.loaded_s

    async def one() -> None:
        while True:
            answers.append(await _ask(origin, data))
            if time.perf_counter() >= until:
                return

    await asyncio.gather(*(one() for _ in range(effort.concurrency)))
    return answers, time.perf_counter() - began


def work(port: int, pid: int, effort: Effort) -> Work:
    """Of the Sluicegate server `pid`. Raises LoadError for an answer without Server-Timing."""
    rows: list[dict[str, float]] = []
    url = f"http://127.0.0.1:{port}{PATH}"
    with httpx.Client(headers=HEADERS, timeout=60.0, trust_env=False) as client:
        for _ in range(effort.alone):
            answer = client.post(url, content=body(stream=False))
            found = _TIMING.findall(answer.headers.get("server-timing", ""))
            rows.append({name: float(ms) for name, ms in found if name not in _NOT_OURS})
    if not all(rows):
        raise LoadError("an answer has no server-timing header")
    meter = CpuMeter(descendants(pid), _ROLES)
    loaded, _ = asyncio.run(_load_only(port, effort))
    cpu_s = meter.read().get("gateway", 0.0)
    return Work(
        steps={name: round(statistics.median(row.get(name, 0.0) for row in rows), 3) for name in rows[0]},
        before_engine_p50=round(statistics.median(sum(row.values()) for row in rows), 3),
        cpu=round(cpu_s * 1000 / max(1, len(loaded)), 3),
    )


async def _load_only(port: int, effort: Effort) -> tuple[list[_AnswerTimes], float]:
    origin = Origin(f"http://127.0.0.1:{port}")
    try:
        return await _loaded(origin, http(port, stream=False), effort)
    finally:
        origin.close()

"""python -m load_tests.soak: mixed load with clients that leave and processes that are killed, for half an hour; then
a look at whether anything has grown.

Starts a server with two gateways and three replicas. Clients stream, wait for whole answers, leave in the middle, and
send what is refused. Every 30 seconds a process is ended with SIGKILL, replicas and gateways in turn; one of each is
spared. Those, and the processes of Ray around them, are watched: memory, descriptors, tasks, Python objects, and at the
end the blocks of the K/V cache. The report has a plot, and says by how much each number has grown from the first third
of the time to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from autoscaling.report.figure import COLOURS, as_svg
from deployments.cli.local_ray import free_port
from deployments.cli.processes import command, descendants
from load_tests.errors import LoadError
from load_tests.machine import cpu_model
from load_tests.peers.demo import MODEL
from load_tests.peers.server import running
from load_tests.servers import sluice_serve

_NAME = "demo"
_KILL_EVERY_S = 30.0
_LOOK_EVERY_S = 10.0
_WAIT_S = 120.0
_KILLED = ("ModelReplica", "Gateway")
_METRIC = re.compile(r'^sluicegate_process_(\w+)\{.*?replica="([^"]+)"\} (\S+)$', re.MULTILINE)
_GATEWAY = re.compile(r'^sluicegate_http_proxy_info\{.*?replica="([^"]+)"', re.MULTILINE)
_HELD = re.compile(r"^sluicegate_(kv_usage|requests_running|requests_waiting)\{.*?\} (\S+)$", re.MULTILINE)
# What may grow from the first third to the last: allocators and caches that fill once settle within that.
_BOUNDS = {"resident_bytes": 0.10, "open_files": 0.10, "tasks": 0.10, "python_blocks": 0.05}


@dataclass(slots=True)
class Watched:
    """`samples`: of each process, by its name, and of each quantity: (seconds since the beginning, value)."""

    samples: dict[str, dict[str, list[tuple[float, float]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    outcomes: Counter[str] = field(default_factory=Counter)
    kills: int = 0

    def lasting(self, seconds: float) -> dict[str, dict[str, list[tuple[float, float]]]]:
        """Those that were there all the time."""
        return {
            name: kinds
            for name, kinds in self.samples.items()
            if all(s[0][0] < 0.15 * seconds and s[-1][0] > 0.9 * seconds for s in kinds.values())
        }


def growth(samples: Sequence[tuple[float, float]], seconds: float) -> float:
    """By which share the median of the last third is above that of the first one, of which the first half does not
    count: caches fill."""
    early = [value for at, value in samples if seconds / 6 <= at < seconds / 2]
    late = [value for at, value in samples if at >= seconds * 2 / 3]
    return statistics.median(late) / max(1.0, statistics.median(early)) - 1


# ------------------------------------------------------------------------------------------------------------ clients
async def client(http: httpx.AsyncClient, rng: random.Random, watched: Watched, end_s: float) -> None:
    """One request after the other, of all kinds."""
    kinds = (_streamed, _whole, _leaves, _refused, _tokenized)
    while time.monotonic() < end_s:
        ask = rng.choices(kinds, (5, 3, 3, 1, 1))[0]
        try:
            outcome = await ask(http, rng)
        except httpx.HTTPError as error:
            outcome = f"connection: {type(error).__name__}"
            await asyncio.sleep(0.2)
        watched.outcomes[f"{ask.__name__.removeprefix('_')}: {outcome}"] += 1


def _body(rng: random.Random) -> dict[str, Any]:
    return {
        "model": _NAME,
        "messages": [
            {"role": "user", "content": f"Tell me of the number {rng.randrange(10**6)}. " * rng.randrange(1, 9)}
        ],
        "max_tokens": rng.randrange(8, 48),
        "n": rng.choice((1, 1, 2)),
        "user": f"user-{rng.randrange(10**9)}",
    }


async def _streamed(http: httpx.AsyncClient, rng: random.Random) -> str:
    async with http.stream("POST", "/v1/chat/completions", json=_body(rng) | {"stream": True}) as answer:
        lines = [line async for line in answer.aiter_lines()]
    if answer.status_code != 200:
        return str(answer.status_code)
    return "200" if "data: [DONE]" in lines else "200, broken off"


async def _whole(http: httpx.AsyncClient, rng: random.Random) -> str:
    return str((await http.post("/v1/chat/completions", json=_body(rng))).status_code)


async def _leaves(http: httpx.AsyncClient, rng: random.Random) -> str:
    try:
        async with asyncio.timeout(rng.uniform(0.05, 1.0)):
            await (_streamed if rng.random() < 0.5 else _whole)(http, rng)
    except TimeoutError:
        return "left"
    return "was quicker"


async def _refused(http: httpx.AsyncClient, rng: random.Random) -> str:
    wrong: dict[str, Any] = rng.choice(
        ({"temperature": 9}, {"messages": []}, {"model": f"m{rng.randrange(10**6)}"}, {"n": 10**9})
    )
    return str((await http.post("/v1/chat/completions", json=_body(rng) | wrong)).status_code)


async def _tokenized(http: httpx.AsyncClient, rng: random.Random) -> str:
    body = {"model": _NAME, "prompt": f"{rng.random()} " * 50}
    return str((await http.post("/tokenize", json=body)).status_code)


# ------------------------------------------------------------------------------------------------------ kills, looks
async def kill_in_turn(root: int, watched: Watched, end_s: float) -> None:
    spared: dict[str, int] = {}
    for title in _KILLED:
        spared[title] = min(_processes(root, title))
    turn = 0
    while time.monotonic() + _KILL_EVERY_S < end_s:
        await asyncio.sleep(_KILL_EVERY_S)
        title = _KILLED[turn % len(_KILLED)]
        turn += 1
        if victims := [pid for pid in _processes(root, title) if pid != spared[title]]:
            os.kill(random.choice(victims), signal.SIGKILL)
            watched.kills += 1


def _processes(root: int, title: str) -> list[int]:
    return [pid for pid in descendants(root) if f":{title}" in command(pid)]


async def look(root: int, http: httpx.AsyncClient, watched: Watched, seconds: float) -> None:
    began_s, said_s = time.monotonic(), 0.0
    while (at := time.monotonic() - began_s) < seconds:
        _look_at_processes(root, watched, at)
        try:
            text = (await http.get("/metrics", timeout=20)).text
            gateways = set(_GATEWAY.findall(text))
            for kind, replica, value in _METRIC.findall(text):
                name = f"{'Gateway' if replica in gateways else 'ModelReplica'} {replica}"
                watched.samples[name][kind].append((at, float(value)))
        except httpx.HTTPError:
            pass  # the gateway that was asked has just been killed
        if at - said_s >= 60:
            said_s, asked = at, sum(watched.outcomes.values())
            print(f"{at / 60:.0f} of {seconds / 60:.0f} minutes: {asked} requests, {watched.kills} kills", flush=True)
        await asyncio.sleep(_LOOK_EVERY_S)


def _look_at_processes(root: int, watched: Watched, at: float) -> None:
    """Of those that give no metrics: the proxy, Serve's controller, Ray's own."""
    for pid in descendants(root):
        title = command(pid)
        if any(f":{name}" in title for name in _KILLED):
            continue
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except OSError:
            continue
        name = f"{_short(title)} {pid}"
        watched.samples[name]["resident_bytes"].append((at, float(pages * os.sysconf("SC_PAGE_SIZE"))))
        watched.samples[name]["open_files"].append((at, float(files)))


def _short(title: str) -> str:
    for part in ("haproxy", "gcs_server", "raylet", "HAProxyManager", "ProxyActor", "ServeController", "ModelRouter"):
        if part in title:
            return part
    return Path(title.split()[0]).name if title.split() else "?"


async def soak(root: int, url: str, seconds: float, clients: int, watched: Watched) -> str:
    """What is still held at the end, "" if nothing is."""
    end_s = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_WAIT_S, trust_env=False, limits=limits) as http:
        async with asyncio.TaskGroup() as tasks:
            for i in range(clients):
                tasks.create_task(client(http, random.Random(i), watched, end_s))
            tasks.create_task(kill_in_turn(root, watched, end_s))
            tasks.create_task(look(root, http, watched, seconds))
        for _ in range(60):
            held = [
                f"{name} {value}" for name, value in _HELD.findall((await http.get("/metrics")).text) if float(value)
            ]
            if not held:
                return ""
            await asyncio.sleep(1)
    return ", ".join(held)


# ------------------------------------------------------------------------------------------------------------- report
def report(watched: Watched, seconds: float, held: str) -> tuple[list[str], bool]:
    """Lines of Markdown, and whether all is well."""
    lines = [
        f"{seconds / 60:.0f} minutes, {sum(watched.outcomes.values())} requests, {watched.kills} processes killed.",
        "",
        "| process | what | first third | last third | growth |",
        "|---|---|---|---|---|",
    ]
    well = not held
    for name, kinds in sorted(watched.lasting(seconds).items()):
        for kind, samples in kinds.items():
            grown = growth(samples, seconds)
            absolute = statistics.median(v for at, v in samples if at >= seconds * 2 / 3)
            early = statistics.median(v for at, v in samples if seconds / 6 <= at < seconds / 2)
            bad = grown > _BOUNDS[kind] and absolute - early > (8 if kind in ("tasks", "open_files") else 0)
            well &= not bad
            unit = 2**20 if kind == "resident_bytes" else 1
            what = "MiB" if kind == "resident_bytes" else kind.replace("_", " ")
            mark = " **grows**" if bad else ""
            lines.append(f"| {name} | {what} | {early / unit:.0f} | {absolute / unit:.0f} | {grown:+.1%}{mark} |")
    lines += ["", f"Still held at the end: {held or 'nothing'}.", "", "| request: answer | times |", "|---|---|"]
    lines += [f"| {outcome} | {times} |" for outcome, times in sorted(watched.outcomes.items())]
    return lines, well


def plot(watched: Watched, seconds: float) -> str:
    """An SVG: each quantity of the processes that were there all the time, relative to its first value."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    lasting = sorted(watched.lasting(seconds).items())
    for axes, kind in zip(figure.subplots(2, 2).flat, _BOUNDS, strict=True):
        with_it = [(name, kinds[kind]) for name, kinds in lasting if kind in kinds]
        for i, (name, samples) in enumerate(with_it):
            first = samples[0][1] or 1.0
            axes.plot(
                [at / 60 for at, _ in samples],
                [value / first for _, value in samples],
                color=COLOURS[i % len(COLOURS)],
                label=name,
                linewidth=1,
            )
        axes.set_title(f"{kind.replace('_', ' ')}, relative to the first sample")
        axes.set_xlabel("minutes")
        axes.legend(fontsize=6)
    return as_svg(figure)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m load_tests.soak", description=__doc__)
    p.add_argument("--minutes", type=float, default=30.0)
    p.add_argument("--clients", type=int, default=12)
    p.add_argument("--model", default=MODEL)
    p.add_argument("--out", type=Path, help="writes OUT.md and OUT.svg")
    args = p.parse_args(argv)
    port, seconds, watched = free_port(), args.minutes * 60, Watched()
    settings = ("replicas=3", "gateway_replicas=2", "gateway.public_metrics=true")
    with tempfile.TemporaryDirectory() as logs:
        try:
            with running(sluice_serve(args.model, port, settings), port, Path(logs) / "server.log") as url:
                held = asyncio.run(soak(os.getpid(), url, seconds, args.clients, watched))
        except LoadError as error:
            print(f"load_tests.soak: {error}", file=sys.stderr)
            return 2
    lines, well = report(watched, seconds, held)
    print("\n".join(lines))
    if args.out is not None:
        heading = f"# Half an hour of mixed load and kills\n\n`python -m load_tests.soak` on {cpu_model()}.\n"
        args.out.with_suffix(".md").write_text("\n".join([heading, f"![]({args.out.name}.svg)", "", *lines, ""]))
        args.out.with_suffix(".svg").write_text(plot(watched, seconds))
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""python -m load_tests.failover: kills replicas under running streams, and looks whether any client noticed.

Starts a server with two replicas and takes its answers to some prompts as what is right, greedy ones and seeded ones.
Then it streams all of them at once, again and again, ends one replica with SIGKILL in the middle, and compares.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson

from deployments.cli.local_ray import free_port
from deployments.cli.processes import command, descendants
from deployments.upstream.events import DONE, EventParser
from load_tests.errors import LoadError
from load_tests.peers.demo import MODEL
from load_tests.peers.server import running
from load_tests.servers import sluice_serve

_NAME = "demo"
_REPLICA = "ModelReplica"
_WAIT_S = 180.0


@dataclass(slots=True)
class StreamedText:
    """What one client got. `done`: the stream ended as it should."""

    text: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    done: bool = False

    @property
    def told(self) -> tuple[object, ...]:
        counts = {key: self.usage.get(key) for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
        return (self.text, self.finish_reason, counts, self.error, self.done)


def bodies(streams: int, max_tokens: int) -> list[dict[str, Any]]:
    """Different prompts; half of them greedy, half drawn with a seed and penalties."""
    made = []
    for i in range(streams):
        drawn = {"temperature": 0.8, "seed": i, "presence_penalty": 0.3, "frequency_penalty": 0.2}
        made.append(
            {
                "model": _NAME,
                "prompt": f"Story number {i}. Once upon a time, in a town of {i + 2} houses, there was",
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **(drawn if i % 2 else {"temperature": 0}),
            }
        )
    return made


async def ask(http: httpx.AsyncClient, body: Mapping[str, Any], answer: StreamedText) -> None:
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            answer.error = f"http {response.status_code}: {(await response.aread())[:200].decode(errors='replace')}"
            return
        events = EventParser()
        async for piece in response.aiter_bytes():
            for data in events.feed(piece):
                if data == DONE:
                    answer.done = True
                else:
                    _take(orjson.loads(data), answer)


def _take(event: Mapping[str, Any], answer: StreamedText) -> None:
    if "error" in event:
        answer.error = str(event["error"].get("message"))
        return
    for choice in event["choices"]:
        answer.text += choice["text"]
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
    answer.usage = event.get("usage") or answer.usage


async def all_at_once(
    url: str, asked: Sequence[Mapping[str, Any]], meanwhile: Callable[[list[StreamedText]], Coroutine[Any, Any, None]]
) -> list[StreamedText]:
    answers = [StreamedText() for _ in asked]
    http = httpx.AsyncClient(base_url=url, timeout=_WAIT_S, trust_env=False)
    async with http, asyncio.TaskGroup() as tasks:
        for body, answer in zip(asked, answers, strict=True):
            tasks.create_task(ask(http, body, answer))
        tasks.create_task(meanwhile(answers))
    return answers


async def _nothing(_: list[StreamedText]) -> None:
    pass


def replicas(root: int) -> list[int]:
    return [pid for pid in descendants(root) if _REPLICA in command(pid)]


async def kill_one(root: int, answers: list[StreamedText], share: float, shortest: int) -> None:
    """Once all streams have begun and `share` of the characters of the shortest answer has come on average."""
    while not all(answer.text or answer.error for answer in answers):
        await asyncio.sleep(0.01)
    while sum(len(answer.text) for answer in answers) < share * shortest * len(answers):
        await asyncio.sleep(0.01)
    os.kill(random.choice(replicas(root)), signal.SIGKILL)


async def until_two(root: int, url: str) -> None:
    """Until the killed replica has a successor that takes requests: both then get some of these."""
    deadline = time.monotonic() + _WAIT_S
    while len(replicas(root)) < 2 or not await _serves(root, url):
        if time.monotonic() > deadline:
            raise LoadError("the killed replica has no successor")
        await asyncio.sleep(0.5)


async def _serves(root: int, url: str) -> bool:
    """Whether each replica has run a request just now, seen by the metrics that each has of its own."""
    async with httpx.AsyncClient(base_url=url, timeout=_WAIT_S, trust_env=False) as http:
        metrics = (await http.get("/metrics")).text
    served = {line.split('replica="')[1].split('"')[0] for line in metrics.splitlines() if "_requests_running{" in line}
    return len(served) >= 2


async def rounds(root: int, url: str, times: int, streams: int, max_tokens: int) -> int:
    """How many answers were not right."""
    asked = bodies(streams, max_tokens)
    right = await all_at_once(url, asked, _nothing)
    if bad := [answer.error for answer in right if not answer.done or answer.error]:
        raise LoadError(f"not even undisturbed: {bad[0]}")
    shortest = min(len(answer.text) for answer in right)
    wrong = 0
    for number in range(times):
        await until_two(root, url)
        share = 0.1 + 0.7 * random.random()

        async def kill(answers: list[StreamedText], share: float = share) -> None:
            await kill_one(root, answers, share, shortest)

        began = time.monotonic()
        got = await all_at_once(url, asked, kill)
        differ = [i for i in range(streams) if got[i].told != right[i].told]
        wrong += len(differ)
        print(
            f"{number + 1}/{times}: killed one replica at {share:.0%} of {streams} streams, "
            f"{streams - len(differ)} answers right, {time.monotonic() - began:.1f} s",
            flush=True,
        )
        for i in differ[:2]:
            print(f"  stream {i}: {got[i].told}\n  instead of {right[i].told}", flush=True)
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m load_tests.failover", description=__doc__)
    p.add_argument("--times", type=int, default=20)
    p.add_argument("--streams", type=int, default=32)
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--model", default=MODEL)
    args = p.parse_args(argv)
    port = free_port()
    launch = sluice_serve(args.model, port, ("replicas=2", "gateway.public_metrics=true"))
    with tempfile.TemporaryDirectory() as logs:
        try:
            with running(launch, port, Path(logs) / "server.log") as url:
                wrong = asyncio.run(rounds(os.getpid(), url, args.times, args.streams, args.max_tokens))
        except LoadError as error:
            print(f"load_tests.failover: {error}", file=sys.stderr)
            return 2
    print(f"{args.times} kills under {args.streams} streams: {wrong} answers wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

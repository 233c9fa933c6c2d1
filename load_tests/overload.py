"""python -m load_tests.overload: twice as many requests as can be served, from three tiers. Who is refused, who waits?

Starts a server whose engine computes nothing but takes its time, finds out how much it serves, and how soon the highest
tier has a first token when it is alone. Then requests of all three tiers come at random times, as many of each, without
regard to how the earlier ones fare. In the end some of the refused come again when they were told to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from deployments.cli.local_ray import free_port
from deployments.upstream.events import DONE, EventParser
from engine.stats import nearest_rank
from load_tests.errors import LoadError
from load_tests.peers.demo import MODEL
from load_tests.report.tables import Table
from load_tests.servers import serving, sluice_serve
from load_tests.stand_in import STAND_IN

_NAME = "demo"
_WAIT_S = 120.0
_AGAIN = 10  # refused ones that come again
_MAX_TOKENS = 50
_SEATS = 8
TIERS = ("gold", "silver", "bronze")  # most important first
KEYS = {tier: f"sk-{tier}-overload" for tier in TIERS}
SETTINGS = (
    f"engine.executor={STAND_IN}",
    "engine.executor_options.step_ms=10",
    f"engine.max_num_seqs={_SEATS}",
    "engine.scheduling_policy=priority",
    "max_queue_s=3",
    f"gateway.tiers={json.dumps({tier: {'priority': 10 * i} for i, tier in enumerate(TIERS)})}",
    f"gateway.api_keys={json.dumps([{'key': key, 'tier': tier} for tier, key in KEYS.items()])}",
    "gateway.default_tier=bronze",
)


@dataclass(slots=True)
class TierOutcome:
    """What the requests of one tier met. `retry_after_s`: what those were told that were refused as too many. `other`:
    every other end, in words."""

    sent: int = 0
    ttft_s: list[float] = field(default_factory=list)
    retry_after_s: list[float] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    @property
    def refused(self) -> float:
        """A share, 0..1."""
        return len(self.retry_after_s) / max(1, self.sent)

    def ttft(self, q: float) -> float:
        return nearest_rank(sorted(self.ttft_s), q) if self.ttft_s else float("nan")


async def ask(http: httpx.AsyncClient, model: str, tier: str, number: int, outcome: TierOutcome) -> bool:
    """Whether it was served."""
    body = {"model": model, "prompt": f"Number {number}:", "max_tokens": _MAX_TOKENS, "stream": True}
    headers = {"authorization": f"Bearer {KEYS[tier]}"}
    outcome.sent += 1
    began, first = time.monotonic(), None
    try:
        async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                if response.status_code == 503 and error["code"] == "server_is_overloaded":
                    outcome.retry_after_s.append(int(response.headers["retry-after-ms"]) / 1000)
                else:
                    outcome.other.append(f"{response.status_code} {error['code']}")
                return False
            events = EventParser()
            async for piece in response.aiter_bytes():
                if first is None and any(data != DONE for data in events.feed(piece)):
                    first = time.monotonic() - began
        if first is None:
            outcome.other.append("no token")
            return False
        outcome.ttft_s.append(first)
        return True
    except (httpx.HTTPError, KeyError, ValueError) as error:
        outcome.other.append(type(error).__name__)
        return False


async def capacity(http: httpx.AsyncClient, model: str, rounds: int) -> float:
    """Requests per second, with twice as many clients as can run at once. Each asks once before it counts."""
    clients = range(2 * _SEATS)
    await asyncio.gather(*(ask(http, model, TIERS[0], number, TierOutcome()) for number in clients))

    async def client(number: int) -> int:
        return sum([await ask(http, model, TIERS[0], number, TierOutcome()) for _ in range(rounds)])

    began = time.monotonic()
    served = sum(await asyncio.gather(*(client(number) for number in clients)))
    return served / (time.monotonic() - began)


async def play(
    http: httpx.AsyncClient, model: str, rates: Mapping[str, float], seconds: float, rng: random.Random
) -> dict[str, TierOutcome]:
    """Requests of each tier at its rate per second."""
    outcomes = {tier: TierOutcome() for tier in rates}
    due: list[tuple[float, str]] = []
    for tier, rate in rates.items():
        at_s = rng.expovariate(rate)
        while at_s < seconds:
            due.append((at_s, tier))
            at_s += rng.expovariate(rate)
    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for number, (at_s, tier) in enumerate(sorted(due)):
            await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
            tasks.create_task(ask(http, model, tier, number, outcomes[tier]))
    return outcomes


async def again(http: httpx.AsyncClient, model: str, outcome: TierOutcome) -> float:
    """Of refused requests that come when they were told to, and nobody else does, the share that is served now."""
    told_s = outcome.retry_after_s[-_AGAIN:]

    async def late(number: int, seconds: float) -> bool:
        await asyncio.sleep(seconds)
        return await ask(http, model, TIERS[-1], number, TierOutcome())

    served = await asyncio.gather(*(late(number, seconds) for number, seconds in enumerate(told_s)))
    return sum(served) / max(1, len(served))


def client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    return httpx.AsyncClient(base_url=url, timeout=_WAIT_S, trust_env=False, limits=limits)


async def report(url: str, seconds: float, factor: float, seed: int) -> Table:
    rng = random.Random(seed)
    async with client(url) as http:
        able = await capacity(http, _NAME, 6)
        if not able:
            raise LoadError("no request was served")
        share = factor * able / len(TIERS)
        alone = (await play(http, _NAME, {TIERS[0]: share}, seconds, rng))[TIERS[0]]
        outcomes = await play(http, _NAME, dict.fromkeys(TIERS, share), seconds, rng)
        back = await again(http, _NAME, outcomes[TIERS[-1]])
    title = (
        f"{able:.1f} requests/s can be served; {factor:g} times as many come for {seconds:.0f} s, as many of each tier."
    )
    heads = ("tier", "requests", "refused", "TTFT p50 ms", "TTFT p99 ms", "retry-after p50 s", "other ends")
    note = (
        f"Of the last {_AGAIN} that were refused, {back:.0%} were served when they came again after the time they were "
        "told, once nobody else came."
    )
    rows = [_row(f"{TIERS[0]}, alone", alone), *(_row(tier, outcome) for tier, outcome in outcomes.items())]
    return Table(title, heads, rows, [note])


def _row(name: str, outcome: TierOutcome) -> tuple[str, ...]:
    told = sorted(outcome.retry_after_s)
    return (
        name,
        str(outcome.sent),
        f"{outcome.refused:.0%}",
        f"{outcome.ttft(0.5) * 1000:.0f}",
        f"{outcome.ttft(0.99) * 1000:.0f}",
        f"{told[len(told) // 2]:.2f}" if told else "-",
        ", ".join(sorted(set(outcome.other))) or "none",
    )


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m load_tests.overload", description=__doc__)
    p.add_argument("--seconds", type=float, default=20.0, help="of each part (default: %(default)s)")
    p.add_argument("--factor", type=float, default=2.0, help="times what can be served (default: %(default)s)")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--out", type=Path, metavar="FILE", help="write the table there too")
    args = p.parse_args(argv)
    port = free_port()
    launch = sluice_serve(MODEL, port, SETTINGS)
    try:
        with tempfile.TemporaryDirectory() as logs, serving(launch, Path(logs) / "server.log"):
            found = asyncio.run(report(f"http://127.0.0.1:{port}", args.seconds, args.factor, args.seed))
    except LoadError as error:
        print(f"load_tests.overload: {error}", file=sys.stderr)
        return 2
    print(found.text())
    if args.out is not None:
        args.out.write_text(f"# Three tiers under overload\n\n`python -m load_tests.overload`\n\n{found.markdown()}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""python -m load_tests.chaos: breaks one part of a running server after the other, and writes down what clients see.

Starts a server with two gateways, two replicas, a key database and limits in Redis. For each fault four streams run
while a short request is sent every half second; the part is killed or stopped (SIGSTOP), and put back after half a
minute. The table says how many requests failed, with which answers, for how long none succeeded, and what became of the
streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import orjson

from deployments.accounts.database import Database
from deployments.accounts.key_store import KeyStore
from deployments.accounts.records import Actor, NewKey
from deployments.cli.local_ray import free_port
from deployments.cli.processes import command, descendants
from load_tests import servers
from load_tests.errors import LoadError
from load_tests.peers.demo import MODEL
from load_tests.processes import end_with_parent
from load_tests.servers import SLUICE, Launch, config_file

_NAME = "demo"
_PROBE_EVERY_S = 0.5
_BEFORE_S = 3.0
_FAULT_S = 30.0
_AFTER_S = 15.0
_PROBE_S = 20.0  # for one answer
_STREAM_TOKENS = 400
_HEAD = (
    "| what happens | requests that succeed | the others | s without any | four streams |",
    "|---|---|---|---|---|",
)


@dataclass(slots=True)
class Seen:
    """What clients saw. `oks`: when requests were sent that succeeded, seconds since the fault."""

    answers: Counter[str] = field(default_factory=Counter)
    oks: list[float] = field(default_factory=list)
    streams: Counter[str] = field(default_factory=Counter)

    @property
    def longest_gap_s(self) -> float:
        """The longest time in which no request that was sent succeeded."""
        moments = sorted(self.oks)
        gaps = [b - a for a, b in pairwise(moments)]
        return max(gaps, default=float("inf")) - _PROBE_EVERY_S


@dataclass(frozen=True, slots=True)
class Fault:
    """`begin` breaks something and gives what mends it."""

    name: str
    begin: Callable[[Site], Callable[[], None]]


@dataclass(slots=True)
class Site:
    """The server and the parts around it."""

    root: int
    url: str
    key: str
    redis: subprocess.Popen[bytes] | None
    database: Path

    def pids(self, title: str) -> list[int]:
        """Of the server's processes whose command line has `title`."""
        return [pid for pid in descendants(self.root) if title in command(pid)]


def _kill(title: str, site: Site) -> Callable[[], None]:
    os.kill(site.pids(title)[0], signal.SIGKILL)
    return lambda: None


def _stop(title: str, site: Site) -> Callable[[], None]:
    pid = site.pids(title)[0]
    os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        with suppress(ProcessLookupError):  # Serve may have ended it
            os.kill(pid, signal.SIGCONT)

    return go_on


def _stop_redis(site: Site) -> Callable[[], None]:
    assert site.redis is not None
    site.redis.send_signal(signal.SIGSTOP)
    return lambda: site.redis.send_signal(signal.SIGCONT) if site.redis is not None else None


def _lock_database(site: Site) -> Callable[[], None]:
    """As a process that hangs in the middle of a transaction does."""
    import sqlite3

    connection = sqlite3.connect(site.database, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN EXCLUSIVE")
    return connection.close


def _move_database(site: Site) -> Callable[[], None]:
    away = site.database.with_suffix(".away")
    site.database.rename(away)

    def back() -> None:
        away.rename(site.database)

    return back


FAULTS = (
    Fault("nothing", lambda _: lambda: None),
    Fault("a replica is killed", partial(_kill, ":ModelReplica")),
    Fault("a replica is stopped", partial(_stop, ":ModelReplica")),
    Fault("a gateway is killed", partial(_kill, ":Gateway")),
    Fault("a gateway is stopped", partial(_stop, ":Gateway")),
    Fault("the router is killed", partial(_kill, ":ModelRouter")),
    Fault("Serve's controller is stopped", partial(_stop, "ServeController")),
    Fault("Ray's GCS is stopped", partial(_stop, "gcs_server")),
    Fault("Redis is stopped", _stop_redis),
    Fault("the key database is locked", _lock_database),
    Fault("the key database is moved away", _move_database),
)


# ------------------------------------------------------------------------------------------------------------ clients
async def probe(http: httpx.AsyncClient, site: Site, seen: Seen, at_s: float) -> None:
    body = {"model": _NAME, "prompt": "1, 2, 3,", "max_tokens": 2, "temperature": 0}
    try:
        answer = await http.post(f"{site.url}/v1/completions", json=body, headers=_auth(site))
    except httpx.TimeoutException:
        seen.answers[f"none within {_PROBE_S:.0f} s"] += 1
        return
    except httpx.HTTPError as error:
        seen.answers[f"connection: {type(error).__name__}"] += 1
        return
    if answer.status_code == 200:
        seen.oks.append(at_s)
        return
    with suppress(ValueError, KeyError, TypeError):
        seen.answers[f"{answer.status_code} {answer.json()['error']['code']}"] += 1
        return
    seen.answers[str(answer.status_code)] += 1


async def stream(http: httpx.AsyncClient, site: Site, seen: Seen) -> None:
    body = {"model": _NAME, "prompt": "Once", "max_tokens": _STREAM_TOKENS, "ignore_eos": True, "stream": True}
    last = ""
    try:
        async with http.stream("POST", f"{site.url}/v1/completions", json=body, headers=_auth(site)) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    last = line.removeprefix("data: ")
    except httpx.HTTPError as error:
        seen.streams[f"connection: {type(error).__name__}"] += 1
        return
    if last == "[DONE]":
        seen.streams["whole"] += 1
    else:
        with suppress(orjson.JSONDecodeError, KeyError, TypeError):
            seen.streams[f"error event: {orjson.loads(last)['error']['message'][:60]}"] += 1
            return
        seen.streams["broken off"] += 1


def _auth(site: Site) -> dict[str, str]:
    return {"authorization": f"Bearer {site.key}"}


async def watch(site: Site, fault: Fault) -> Seen:
    """What clients see before, during and after the fault."""
    seen = Seen()
    limits = httpx.Limits(max_keepalive_connections=0)
    http = httpx.AsyncClient(timeout=_PROBE_S, trust_env=False, limits=limits)
    async with http, asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(stream(http, site, seen))
        began_s, mend = time.monotonic() + _BEFORE_S, None
        while (at_s := time.monotonic() - began_s) < _FAULT_S + _AFTER_S:
            if mend is None and at_s >= 0:
                mend = fault.begin(site)
            if mend is not None and at_s >= _FAULT_S:
                mend()
                mend = _nothing
            tasks.create_task(probe(http, site, seen, at_s))
            await asyncio.sleep(_PROBE_EVERY_S)
    return seen


def _nothing() -> None:
    pass


async def until_well(site: Site) -> None:
    """Until two replicas and two gateways serve again. Raises LoadError."""
    deadline_s, in_a_row = time.monotonic() + 180, 0
    async with httpx.AsyncClient(timeout=_PROBE_S, trust_env=False) as http:
        while in_a_row < 5:
            if time.monotonic() > deadline_s:
                raise LoadError("the server does not recover")
            seen = Seen()
            await probe(http, site, seen, 0.0)
            whole = len(site.pids(":ModelReplica")) >= 2 and len(site.pids(":Gateway")) >= 2
            in_a_row = in_a_row + 1 if seen.oks and whole else 0
            await asyncio.sleep(1.0)


# -------------------------------------------------------------------------------------------------------------- parts
@contextmanager
def redis_server(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]] | None]:
    """Its URL and process; None where there is no redis-server."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    socket = folder / "redis.sock"
    argv = [program, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, preexec_fn=end_with_parent)
    try:
        yield f"unix://{socket}", process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def new_key(database: Path) -> str:
    made = Database(str(database))
    try:
        made.migrate()
        return KeyStore(made).create(NewKey("chaos"), Actor("load_tests.chaos"))[1]
    finally:
        made.close()


def arguments(model: str, database: Path, redis: str | None) -> dict[str, Any]:
    gateway: dict[str, Any] = {
        "keys": {"database": str(database)},
        "ledger": {"spill_dir": str(database.parent / "spill")},
        "tiers": {"default": {"max_concurrent": 1000}},
    }
    if redis is not None:
        gateway["limits"] = {"store": "redis", "redis_url": redis}
    engine = {"model": model, "device": "cpu"}
    return {
        "models": [{"name": _NAME, "replicas": 2, "engine": engine}],
        "gateway": gateway,
        "gateway_replicas": 2,
    }


def row(fault: Fault, seen: Seen) -> str:
    num = len(seen.oks) + sum(seen.answers.values())
    failed = ", ".join(f"{count} x {answer}" for answer, count in seen.answers.most_common()) or "none"
    streams = ", ".join(f"{count} {end}" for end, count in seen.streams.most_common())
    gap_s = max(0.0, seen.longest_gap_s)
    return f"| {fault.name} | {len(seen.oks)} of {num} | {failed} | {gap_s:.1f} | {streams} |"


async def run(site: Site, faults: Sequence[Fault]) -> list[str]:
    rows = []
    for fault in faults:
        await until_well(site)
        rows.append(row(fault, await watch(site, fault)))
        print(rows[-1], flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    names = [fault.name for fault in FAULTS]
    p = argparse.ArgumentParser(prog="python -m load_tests.chaos", description=(__doc__ or "").split("\n")[0])
    p.add_argument("--only", action="append", choices=names, metavar="FAULT", help=f"of: {'; '.join(names)}")
    p.add_argument("--model", default=MODEL)
    p.add_argument("--out", type=Path, help="writes the table there")
    args = p.parse_args(argv)
    port = free_port()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        database, config, log = folder / "keys.db", folder / "serve.yaml", folder / "server.log"
        key = new_key(database)
        with redis_server(folder) as redis:
            config.write_text(json.dumps(config_file(arguments(args.model, database, redis and redis[0]), port)))
            launch = Launch((*SLUICE, "serve", "--config", str(config)), _NAME)
            faults = [fault for fault in FAULTS if args.only is None or fault.name in args.only]
            faults = [fault for fault in faults if redis or "Redis" not in fault.name]
            print("\n".join(_HEAD), flush=True)
            try:
                with servers.serving(launch, log):
                    site = Site(os.getpid(), f"http://127.0.0.1:{port}", key, redis and redis[1], database)
                    rows = asyncio.run(run(site, faults))
            except LoadError as error:
                print(f"load_tests.chaos: {error}", file=sys.stderr)
                return 2
    if args.out is not None:
        args.out.write_text("\n".join(["# What clients see when a part fails", "", *_HEAD, *rows, ""]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""python -m load_tests.peers: our server and others, measured side by side."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from load_tests.errors import LoadError
from load_tests.machine import busy_cores, cpu_model
from load_tests.peers.base import DEFAULT, PEERS, Models, Peer, is_ours
from load_tests.peers.compare import PeerRounds
from load_tests.peers.report import PeerReport, missing, report_of, tables
from load_tests.peers.store import PeerRow, Store
from load_tests.peers.workloads import PREFIX, PeerWorkload
from load_tests.peers.workloads import main as main_workload
from load_tests.report.tables import markdown, text

_CACHE = Path.home() / ".cache" / "sluicegate" / "peers"
_BUSY = 0.1
_METHOD = (
    "One server at a time, in alternating rounds, started anew for each; medians over the rounds. Closed loop of "
    "streamed greedy completions over HTTP, sent by load_tests from the same machine. main: prompts of about 256 "
    "tokens without a common prefix, 64 out. prefix: 1024 shared and 32 own tokens, 16 out, the prefix not cached at "
    "first. `tok/s x`: its throughput over this row's; `TTFT x`: this row's TTFT over its; above 1, ours is better."
)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m load_tests.peers", description=__doc__)
    p.add_argument("--peers", default=",".join(DEFAULT), help=f"of {', '.join(PEERS.names())}; default: %(default)s")
    p.add_argument("--rounds", type=_count, default=3, help="default: %(default)s")
    p.add_argument("--workload", default="main,prefix", help="main, prefix or both; default: %(default)s")
    p.add_argument("--concurrency", type=_count, nargs="+", default=[1, 8, 32], metavar="N", help="of main")
    p.add_argument("--out", type=Path, default=Path("load_tests/results"), help="folder; default: %(default)s")
    p.add_argument("--resume", action="store_true", help="keep what --out already has and measure what is missing")
    p.add_argument("--prepare-only", action="store_true", help="install, build and convert, then stop")
    p.add_argument("--cache", type=Path, default=_CACHE, help="where the engines are kept; default: %(default)s")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """0: all measured. 1: something was not. 2: nothing could be begun. 130: interrupted; --resume goes on."""
    args = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        names, workloads = _names(args.peers), _workloads(args.workload, args.concurrency)
        store = Store(args.out / "peers.jsonl", args.resume)
        comparison = PeerRounds(args.cache, store, workloads, _say)
        models, peers = comparison.prepare(names)
        if args.prepare_only:
            return 0 if len(peers) == len(names) else 1
        if (busy := busy_cores()) > _BUSY:
            _say(f"{busy:.1f} cores are busy with something else: figures will be lower than they should be")
        interrupted = _run(comparison, models, peers, args.rounds)
    except LoadError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    report = report_of(store.rows, names, [w.name for w in workloads])
    _write(args.out, report, store.rows)
    if interrupted:
        return 130
    return 1 if report.failures or any(cell.failed for cell in report.cells.values()) else 0


def _run(comparison: PeerRounds, models: Models, peers: dict[str, Peer], rounds: int) -> bool:
    """Whether it was interrupted."""
    try:
        comparison.run(models, peers, rounds)
    except KeyboardInterrupt:
        _say("interrupted; --resume goes on")
        return True
    return False


def _names(given: str) -> list[str]:
    names = list(dict.fromkeys(given.split(",")))
    for name in names:
        if name not in PEERS.names():
            raise LoadError(f"no engine {name!r}; known: {', '.join(PEERS.names())}")
    return names


def _workloads(given: str, concurrencies: Sequence[int]) -> list[PeerWorkload]:
    kinds = given.split(",")
    if unknown := set(kinds) - {"main", "prefix"}:
        raise LoadError(f"no workload {sorted(unknown)[0]!r}; known: main, prefix")
    mains = [main_workload(c) for c in dict.fromkeys(concurrencies)] if "main" in kinds else []
    return mains + ([PREFIX] if "prefix" in kinds else [])


def _write(out: Path, report: PeerReport, rows: Sequence[PeerRow]) -> None:
    found, failures = tables(report), missing(report)
    cells: list[dict[str, Any]] = []
    for (workload, peer), cell in report.cells.items():
        ratios = {p: report.ratio(workload, p, peer) for p in report.peers if is_ours(p)}
        cells.append(asdict(cell) | {"ratios": {p: asdict(r) for p, r in ratios.items() if r is not None}})
    machine = f"{os.cpu_count()} cores, {cpu_model()}"
    data = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine,
        "busy": max((row.busy for row in rows), default=0.0),
        "versions": report.versions,
        "cells": cells,
        "failures": report.failures,
    }
    (out / "peers.json").write_text(json.dumps(data, indent=1) + "\n")
    head = f"# Engines side by side\n\n{data['at']}, {machine}; at most {data['busy']:.2f} cores busy before a start."
    (out / "peers.md").write_text(f"{head}\n\n{_METHOD}\n\n{markdown(found, failures)}", encoding="utf-8")
    print(f"\n{text(found, failures)}\n\nreport: {out / 'peers.md'}, {out / 'peers.json'}")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

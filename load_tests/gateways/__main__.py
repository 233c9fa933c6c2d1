"""python -m load_tests.gateways: what our gateway and LiteLLM's add to a request, measured side by side."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from deployments.cli.local_ray import free_port
from load_tests.errors import LoadError
from load_tests.gateways.measure import FULL, QUICK, Effort, Work, measure, work
from load_tests.gateways.report import KINDS, PEER, GatewayRow, added_ms, ratio, tables
from load_tests.gateways.targets import DEFAULT, TARGETS, Direct, GatewayTarget, running
from load_tests.machine import busy_cores
from load_tests.report.tables import markdown, text

_CACHE = Path.home() / ".cache" / "sluicegate" / "peers"
_BUSY = 0.1
_METHOD = (
    "One target at a time, in alternating rounds, started anew for each; medians over the rounds; client and servers "
    "share one machine. A chat of about 256 tokens, 32 out, alone (latency) and with 32 at a time (throughput). "
    "Both stand in front of the same mock, which answers at once. litellm: one worker, a master key, no database and "
    "no limits. sluicegate: keys, tiers and limits on. Added: p50 beyond that of the mock alone. Reads: in which the "
    "client got the answer; ours sends tokens together that come together. sluicegate-engine: our own engine in the "
    "mock's place, with steps that take no time; its scheduling of 32 steps counts as the gateway's."
)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m load_tests.gateways", description=__doc__)
    names = TARGETS.names()
    p.add_argument("--targets", default=",".join(DEFAULT), help=f"of {', '.join(names)}; default: %(default)s")
    p.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    p.add_argument("--quick", action="store_true", help="one short round: does everything work?")
    p.add_argument("--out", type=Path, default=Path("load_tests/results"), help="folder; default: %(default)s")
    p.add_argument("--prepare-only", action="store_true", help="install, then stop")
    p.add_argument("--cache", type=Path, default=_CACHE, help="where the peer is kept; default: %(default)s")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """0: all measured. 1: something was not. 2: nothing could be begun. 130: interrupted."""
    args = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rounds, effort = (1, QUICK) if args.quick else (args.rounds, FULL)
    try:
        comparison = _GatewayRounds(args.cache, args.targets.split(","), effort)
        if not args.prepare_only:
            if (busy := busy_cores()) > _BUSY:
                _say(f"{busy:.1f} cores are busy with something else: figures will be worse than they should be")
            for number in range(1, rounds + 1):
                comparison.round(number, rounds, cost=number == rounds)
    except LoadError as error:
        print(f"gateways: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if not args.prepare_only:
        comparison.write(args.out)
    return 1 if comparison.failures else 0


class _GatewayRounds:
    def __init__(self, cache: Path, names: Sequence[str], effort: Effort) -> None:
        """Installs what is missing. Raises LoadError for an unknown name."""
        self._logs = cache / "logs"
        self._effort = effort
        self.rows: list[GatewayRow] = []
        self.work: dict[str, Work] = {}
        self.failures: list[str] = []
        self._targets: dict[str, GatewayTarget] = {}
        for name in names:
            if name not in TARGETS.names():
                raise LoadError(f"no gateway {name!r}; known: {', '.join(TARGETS.names())}")
            target = TARGETS.get(name)(cache / name)
            try:
                target.prepare(partial(_say_of, name))
                self._targets[name] = target
            except LoadError as error:
                self._failed(name, str(error))

    def round(self, number: int, of: int, cost: bool) -> None:
        """`cost`: of our gateways also what a request costs them."""
        for name, target in self._targets.items():
            _say(f"== round {number} of {of}: {name}")
            try:
                self._one(name, target, number, cost)
            except LoadError as error:
                self._failed(name, str(error))

    def _one(self, name: str, target: GatewayTarget, number: int, cost: bool) -> None:
        port, mock_port = free_port(), free_port()
        with ExitStack() as stack:
            if target.upstream:
                mock = Direct(self._logs).launch(mock_port, 0)
                stack.enter_context(running(mock, mock_port, self._logs / "mock.log"))
            launch = target.launch(port, mock_port)
            pid = stack.enter_context(running(launch, port, self._logs / f"{name}.log"))
            for kind in KINDS:
                figures = measure(port, kind == "streamed", self._effort)
                self.rows.append(GatewayRow(name, target.version(), kind, number, figures))
                _say_of(name, f"{kind}: p50 {figures.latency_p50_ms:.1f} ms, {figures.requests_per_s:.1f} requests/s")
            if cost and name.startswith("sluicegate"):
                self.work[name] = work(port, pid, self._effort)

    def _failed(self, name: str, why: str) -> None:
        _say_of(name, why)
        self.failures.append(f"{name}: {why}")

    def write(self, out: Path) -> None:
        found = tables(self.rows, self.work)
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        against = {
            f"{name} {kind}": {"added_ms": added_ms(self.rows, name, kind), **asdict(ratio(self.rows, name, kind))}
            for name in self._targets
            for kind in KINDS
        }
        data = {
            "at": at,
            "cores": os.cpu_count(),
            "method": _METHOD,
            f"against_{PEER}": against,
            "work": {name: asdict(one) for name, one in self.work.items()},
            "rows": [asdict(row) for row in self.rows],
            "failures": self.failures,
        }
        out.mkdir(parents=True, exist_ok=True)
        (out / "gateways.json").write_text(json.dumps(data, indent=1) + "\n")
        (out / "gateways.md").write_text(
            f"# Gateways\n\n{at}, {os.cpu_count()} cores. {_METHOD}\n\n{markdown(found, self.failures)}"
        )
        print(text(found, self.failures))


def _say_of(name: str, text: str) -> None:
    _say(f"{name}: {text}")


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

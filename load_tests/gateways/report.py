"""Medians over the rounds, what each gateway adds to the mock, and how the two compare. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from load_tests.gateways.measure import GatewayFigures, Work
from load_tests.report.tables import Table

MOCK, PEER = "mock", "litellm"
KINDS = ("plain", "streamed")
AIMS = {"plain": (1 / 3, 4.0), "streamed": (1 / 10, 15.0)}
"""At most this part of the peer's added latency, at least this many times its throughput."""
WORK_AIM_MS = 2.0


@dataclass(frozen=True, slots=True)
class GatewayRow:
    """What one round measured on one target."""

    target: str
    version: str
    kind: str
    round_number: int
    figures: GatewayFigures


@dataclass(frozen=True, slots=True)
class GatewayRatio:
    """Ours over the peer's: `added` latency (smaller is better) and `throughput`; None where one is missing or the
    added latency is not above zero."""

    added: float | None
    throughput: float | None


def middle(rows: Sequence[GatewayRow], target: str, kind: str) -> GatewayFigures | None:
    found = [asdict(row.figures) for row in rows if (row.target, row.kind) == (target, kind)]
    if not found:
        return None
    values: dict[str, Any] = {name: round(median(f[name] for f in found), 2) for name in found[0]}
    return GatewayFigures(**{**values, "failed": sum(f["failed"] for f in found)})


def added_ms(rows: Sequence[GatewayRow], target: str, kind: str) -> float | None:
    own, mock = middle(rows, target, kind), middle(rows, MOCK, kind)
    return None if own is None or mock is None else round(own.latency_p50_ms - mock.latency_p50_ms, 2)


def ratio(rows: Sequence[GatewayRow], target: str, kind: str) -> GatewayRatio:
    ours, theirs = added_ms(rows, target, kind), added_ms(rows, PEER, kind)
    own, peer = middle(rows, target, kind), middle(rows, PEER, kind)
    fast = own is not None and peer is not None and peer.requests_per_s > 0
    return GatewayRatio(
        added=round(ours / theirs, 3) if ours is not None and theirs is not None and theirs > 0 else None,
        throughput=round(own.requests_per_s / peer.requests_per_s, 2) if fast and own and peer else None,
    )


def tables(rows: Sequence[GatewayRow], work: Mapping[str, Work]) -> list[Table]:
    """One for each kind of answer, and one of the way through our own gateway where that was measured."""
    found = [_table(rows, kind) for kind in KINDS]
    if work:
        names = list(dict.fromkeys(name for one in work.values() for name in one.steps))
        found.append(
            Table(
                "A plain request's way through our gateway, ms",
                ["gateway", *names, "before the engine", "CPU of the process per request"],
                [
                    [target, *(_shown(v) for v in (*map(one.steps.get, names), one.before_engine_p50, one.cpu))]
                    for target, one in work.items()
                ],
                [f"Aim: at most {WORK_AIM_MS:.0f} ms before the engine."],
            )
        )
    return found


def _table(rows: Sequence[GatewayRow], kind: str) -> Table:
    heads = ["gateway", "p50 ms", "added p50 ms", "p95 ms", "first byte p50 ms", "reads", "requests/s at 32", "failed"]
    heads += ["added, part of litellm's", "requests/s, times litellm's"]
    versions = {row.target: row.version for row in rows}
    cells = []
    for target, version in versions.items():
        figures = middle(rows, target, kind)
        if figures is None:
            continue
        against = ratio(rows, target, kind) if target not in (MOCK, PEER) else GatewayRatio(None, None)
        cells.append(
            [
                f"{target} {version}".strip(),
                f"{figures.latency_p50_ms:.1f}",
                _shown(None if target == MOCK else added_ms(rows, target, kind)),
                f"{figures.latency_p95_ms:.1f}",
                f"{figures.first_p50_ms:.1f}",
                f"{figures.pieces:.0f}",
                f"{figures.requests_per_s:.1f}",
                str(figures.failed),
                _shown(against.added),
                _shown(against.throughput),
            ]
        )
    most, least = AIMS[kind]
    return Table(
        kind, heads, cells, [f"Aims: at most {most:.2f} of the added latency, {least:.0f} times the requests."]
    )


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

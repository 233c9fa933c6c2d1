"""Medians over the rounds, and how many times faster ours is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from load_tests.peers.base import is_ours
from load_tests.peers.store import PeerRow
from load_tests.report.tables import Table


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine on one workload. Medians over `rounds` rounds; `low` and `high` are the slowest and fastest round's
    output tokens per second. `failed`: requests, in all rounds. Several tokens may come in one event: `itl_ms` is
    between events, `tpot_ms` per token."""

    peer: str
    workload: str
    rounds: int
    output_tokens_per_s: float
    low: float
    high: float
    ttft_ms: float
    itl_ms: float
    tpot_ms: float
    failed: int


@dataclass(frozen=True, slots=True)
class PeerRatio:
    """Above 1 is in our favour: our throughput over the peer's, its TTFT over ours."""

    throughput: float
    ttft: float


@dataclass(frozen=True, slots=True)
class PeerReport:
    """`cells` by (workload, peer), in the order asked for. `failures`: peer -> why it, or which part of it, is
    missing."""

    workloads: tuple[str, ...]
    peers: tuple[str, ...]
    versions: dict[str, str]
    cells: dict[tuple[str, str], Cell]
    failures: dict[str, list[str]]

    def ratio(self, workload: str, ours: str, peer: str) -> PeerRatio | None:
        a, b = self.cells.get((workload, ours)), self.cells.get((workload, peer))
        if a is None or b is None or ours == peer or not (b.output_tokens_per_s and a.ttft_ms):
            return None
        return PeerRatio(a.output_tokens_per_s / b.output_tokens_per_s, b.ttft_ms / a.ttft_ms)


def report_of(rows: Sequence[PeerRow], peers: Sequence[str], workloads: Sequence[str]) -> PeerReport:
    failures: dict[str, list[str]] = {}
    for row in rows:
        if row.error is not None and row.peer in peers:
            text = f"{row.workload}: {row.error}" if row.workload else row.error
            if text not in failures.setdefault(row.peer, []):
                failures[row.peer].append(text)
    cells = ((w, p, _cell(r for r in rows if (r.workload, r.peer) == (w, p))) for w in workloads for p in peers)
    return PeerReport(
        workloads=tuple(workloads),
        peers=tuple(peers),
        versions={row.peer: row.version for row in rows if row.version},
        cells={(w, p): cell for w, p, cell in cells if cell is not None},
        failures=failures,
    )


def _cell(rows: Iterable[PeerRow]) -> Cell | None:
    rows = [row for row in rows if row.measurement is not None]
    found = [row.measurement for row in rows if row.measurement is not None]
    if not found:
        return None
    speeds = [m.output_tokens_per_s for m in found]
    return Cell(
        peer=rows[0].peer,
        workload=rows[0].workload,
        rounds=len(found),
        output_tokens_per_s=round(median(speeds), 2),
        low=min(speeds),
        high=max(speeds),
        ttft_ms=round(median(m.ttft_ms for m in found), 1),
        itl_ms=round(median(m.itl_ms for m in found), 1),
        tpot_ms=round(median(m.tpot_ms for m in found), 1),
        failed=sum(sum(m.errors.values()) for m in found),
    )


def tables(report: PeerReport) -> list[Table]:
    """One for each workload."""
    ours = [p for p in report.peers if is_ours(p)]
    heads = ["engine", "tok/s", "(min-max)", "TTFT p50 ms", "ITL p50 ms", "ms/token p50"]
    heads += [f"{o} {what}" for o in ours for what in ("tok/s x", "TTFT x")]
    return [
        Table(workload, heads, [_entries(report, workload, peer, ours, len(heads)) for peer in report.peers])
        for workload in report.workloads
    ]


def missing(report: PeerReport) -> list[str]:
    """What could not be measured, and why."""
    return [f"{peer}: {text}" for peer, texts in report.failures.items() for text in texts]


def _entries(report: PeerReport, workload: str, peer: str, ours: Sequence[str], width: int) -> list[str]:
    name = f"{peer} {report.versions.get(peer, '')}".strip()
    cell = report.cells.get((workload, peer))
    if cell is None:
        why = report.failures.get(peer, ["-"])[-1]
        return [name, why if len(why) < 60 else f"{why[:57]}...", *[""] * (width - 2)]
    row = [
        name + (f" ({cell.failed} requests failed)" if cell.failed else ""),
        f"{cell.output_tokens_per_s:.1f}",
        f"{cell.low:.1f}-{cell.high:.1f}",
        f"{cell.ttft_ms:.0f}",
        f"{cell.itl_ms:.1f}",
        f"{cell.tpot_ms:.1f}",
    ]
    for own in ours:
        ratio = report.ratio(workload, own, peer)
        row += [f"{ratio.throughput:.2f}", f"{ratio.ttft:.2f}"] if ratio else ["", ""]
    return row

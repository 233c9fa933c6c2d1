"""The shared book of several gateways, which lease amounts from it so as not to ask for every request. Pure.

Each gateway reports from time to time what it has admitted and ended, gives back what is left of its leases, asks for
claims its leases did not cover, and gets new leases. What is leased counts as used for everybody else, so the limit
holds at every moment. Leases are a part of what is free and there are none where little is: near the limit every claim
is decided here, exactly. A claim refused only because of others' leases is called contended; nothing of its meters is
leased again for a while, the others hand theirs back with their next report, and the claim is asked again.

A gateway that has not reported for `lease_s` is taken for dead: its leases and all that its open claims hold are free.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from deployments.limits.base import NOTHING, Amount, Claim, Grant, Meter, Refusal, State
from deployments.limits.book import Book

_SHARE = 4  # leases of all gateways together are at most this part of what is free
_SCARCE = 8  # no leases while less than this part of the limit is free
_CONTENDED_S = 5.0


@dataclass(frozen=True, slots=True)
class Report:
    """What a gateway says. All its earlier leases end with it. `number` counts its reports: a repeated one is answered
    as before and changes nothing. `opened` was admitted from leases; `closed` has ended; `claims` are to be decided;
    `peeks` are only looked at; for `wanted` leases are asked."""

    gateway: str
    number: int
    opened: tuple[Claim, ...] = ()
    closed: tuple[tuple[str, Amount], ...] = ()
    claims: tuple[Claim, ...] = ()
    peeks: tuple[tuple[Meter, ...], ...] = ()
    wanted: tuple[Meter, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """`outcomes` and `peeks` in the report's order. `contended`: ids of claims to ask again. `leases`: how much of a
    meter, by name, the gateway may admit itself until `lease_s` after it sent the report. `used`: the counts of the
    wanted meters."""

    outcomes: tuple[Grant | Refusal, ...]
    peeks: tuple[tuple[State, ...], ...]
    contended: frozenset[str]
    leases: dict[str, int]
    used: dict[str, int]


@dataclass(slots=True)
class _Gateway:
    number: int
    heard_s: float
    answer: Answer
    open: set[str] = field(default_factory=set)
    leases: dict[str, int] = field(default_factory=dict)


_NO_ANSWER = Answer((), (), frozenset(), {}, {})


class Hub:
    """Knows every gateway that has reported within `lease_s`."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._book = Book()
        self._gateways: dict[str, _Gateway] = {}
        self._leased: Counter[str] = Counter()
        self._contended: dict[str, float] = {}  # meter name -> until when

    def report(self, report: Report, now_s: float) -> Answer:
        self._bury(now_s)
        gateway = self._gateways.setdefault(report.gateway, _Gateway(-1, now_s, _NO_ANSWER))
        gateway.heard_s = now_s
        if gateway.number == report.number:
            return gateway.answer
        gateway.number = report.number
        self._take_back(gateway)
        for claim in report.opened:
            self._book.take(claim, now_s)
            gateway.open.add(claim.id)
        for claim_id, used in report.closed:
            self._close(gateway, claim_id, used)
        contended: set[str] = set()
        outcomes = tuple(self._decide(gateway, claim, contended, now_s) for claim in report.claims)
        gateway.leases = self._lease(report.wanted, now_s)
        self._leased.update(gateway.leases)
        gateway.answer = Answer(
            outcomes,
            tuple(self._book.peek(meters, now_s) for meters in report.peeks),
            frozenset(contended),
            gateway.leases,
            {meter.name: self._book.used(meter, now_s) for meter in report.wanted},
        )
        return gateway.answer

    def _decide(self, gateway: _Gateway, claim: Claim, contended: set[str], now_s: float) -> Grant | Refusal:
        outcome = self._book.reserve(claim, now_s, self._leased)
        if isinstance(outcome, Grant):
            gateway.open.add(claim.id)
            return outcome
        if outcome.retry_after_s is not None and self._fits_without_leases(claim, now_s):
            contended.add(claim.id)
            self._contended.update((meter.name, now_s + _CONTENDED_S) for meter in claim.meters)
            return replace(outcome, retry_after_s=self._lease_s)
        return self._book.reserve(claim, now_s)  # leases come home: they are not what has to be waited for

    def _fits_without_leases(self, claim: Claim, now_s: float) -> bool:
        return all(self._book.used(m, now_s) + claim.cost(m.kind) <= m.limit for m in claim.meters)

    def _lease(self, wanted: tuple[Meter, ...], now_s: float) -> dict[str, int]:
        leases = {}
        for meter in wanted:
            free = meter.limit - self._book.used(meter, now_s) - self._leased[meter.name]
            if now_s >= self._contended.get(meter.name, now_s) and free * _SCARCE >= meter.limit:
                leases[meter.name] = free // (_SHARE * len(self._gateways))
        return leases

    def _take_back(self, gateway: _Gateway) -> None:
        for name, amount in gateway.leases.items():
            self._leased[name] -= amount
            if not self._leased[name]:
                del self._leased[name]
        gateway.leases = {}

    def _close(self, gateway: _Gateway, claim_id: str, used: Amount) -> None:
        if claim_id in gateway.open:
            gateway.open.discard(claim_id)
            self._book.settle(claim_id, used)

    def _bury(self, now_s: float) -> None:
        for name, gateway in list(self._gateways.items()):
            if now_s - gateway.heard_s >= self._lease_s:
                del self._gateways[name]
                self._take_back(gateway)
                for claim_id in gateway.open:
                    self._book.settle(claim_id, NOTHING)
        self._contended = {name: until for name, until in self._contended.items() if until > now_s}

"""The counters that several gateways share. They lease amounts from it, so as not to ask for every request. Pure.

Each gateway reports from time to time what it has admitted and what has ended, gives back what is left of its leases,
asks for reservations that its leases do not cover, and gets new leases. What is leased counts as used for everybody
else, so a limit holds at every moment. A lease is a part of what is free, and there is none where little is: near the
limit every reservation is decided here, exactly. A reservation that is refused only because of others' leases is called
contended: nothing of its limits is leased again for a while, the others give theirs back with their next report, and
the reservation is asked for again.

A gateway that has not reported for `lease_s` counts as dead: its leases are free, and the sequences of its open
reservations; their requests and tokens count as used. If it reports again it was only silent, and is told that it was
forgotten: it then opens its reservations anew, so that what runs is counted and what ends is settled. The same brings
the counts of running sequences back after these counters have been restarted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from deployments.limits.base import Amount, Grant, Limit, LimitKind, LimitState, Refusal, Reservation
from deployments.limits.counters import Counters

_SHARE = 4  # all leases together are at most one such part of what is free, so that others still find something
_SCARCE = 8  # there are no leases while less than one such part of the limit is free
_CONTENDED_S = 5.0  # for which nothing is leased of a limit after a contended reservation


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """What a gateway says. All its earlier leases end with it. `number` counts its reports; one that comes again is
    answered as before and changes nothing. `opened` was admitted from leases, `reopened` was open when the gateway was
    forgotten, `closed` has ended, `reservations` are to be decided, `peeks` are only looked at, and of `wanted` the
    gateway asks for leases."""

    gateway: str
    number: int
    opened: tuple[Reservation, ...] = ()
    reopened: tuple[Reservation, ...] = ()
    closed: tuple[tuple[str, Amount], ...] = ()
    reservations: tuple[Reservation, ...] = ()
    peeks: tuple[tuple[Limit, ...], ...] = ()
    wanted: tuple[Limit, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """`outcomes` and `peeks` are in the report's order. `contended`: the ids of reservations to ask for again.
    `leases`: how much of a limit, by name, the gateway may admit itself until `lease_s` seconds after it sent the
    report. `used`: the counts of the wanted limits. `forgotten`: the gateway was not known any more, nor what it has
    open."""

    outcomes: tuple[Grant | Refusal, ...]
    peeks: tuple[tuple[LimitState, ...], ...]
    contended: frozenset[str]
    leases: dict[str, int]
    used: dict[str, int]
    forgotten: bool = False


@dataclass(slots=True)
class _Gateway:
    number: int
    heard_s: float
    answer: ReportAnswer
    open: set[str] = field(default_factory=set)
    leases: dict[str, int] = field(default_factory=dict)


_NO_ANSWER = ReportAnswer((), (), frozenset(), {}, {})


class SharedCounters:
    """The counters, and every gateway that has reported within `lease_s` seconds."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._counters = Counters()
        self._gateways: dict[str, _Gateway] = {}
        self._leased: Counter[str] = Counter()
        self._contended: dict[str, float] = {}  # limit name -> until when

    def report(self, report: GatewayReport, now_s: float) -> ReportAnswer:
        """What a gateway says, and what it is told."""
        self._forget_dead(now_s)
        forgotten = report.gateway not in self._gateways and report.number > 0
        gateway = self._gateways.setdefault(report.gateway, _Gateway(-1, now_s, _NO_ANSWER))
        gateway.heard_s = now_s
        if gateway.number == report.number:
            return gateway.answer
        gateway.number = report.number
        self._take_back(gateway)
        for reservation in report.opened:
            self._counters.take(reservation, now_s)
            gateway.open.add(reservation.id)
        for reservation in report.reopened:
            if reservation.id not in gateway.open:
                self._counters.take(_sequences_only(reservation), now_s)
                gateway.open.add(reservation.id)
        for reservation_id, used in report.closed:
            self._close(gateway, reservation_id, used, now_s)
        contended: set[str] = set()
        outcomes = tuple(self._decide(gateway, reservation, contended, now_s) for reservation in report.reservations)
        gateway.leases = self._lease(report.wanted, now_s)
        self._leased.update(gateway.leases)
        gateway.answer = ReportAnswer(
            outcomes,
            tuple(self._counters.peek(limits, now_s) for limits in report.peeks),
            frozenset(contended),
            gateway.leases,
            {limit.name: self._counters.used(limit, now_s) for limit in report.wanted},
            forgotten,
        )
        return gateway.answer

    def _decide(
        self, gateway: _Gateway, reservation: Reservation, contended: set[str], now_s: float
    ) -> Grant | Refusal:
        outcome = self._counters.reserve(reservation, now_s, self._leased)
        if isinstance(outcome, Grant):
            gateway.open.add(reservation.id)
            return outcome
        if outcome.retry_after_s is not None and self._fits_without_leases(reservation, now_s):
            contended.add(reservation.id)
            self._contended.update((limit.name, now_s + _CONTENDED_S) for limit in reservation.limits)
            return replace(outcome, retry_after_s=self._lease_s)
        return self._counters.reserve(reservation, now_s)  # leases come home: they are not what has to be waited for

    def _fits_without_leases(self, reservation: Reservation, now_s: float) -> bool:
        return all(self._counters.used(m, now_s) + reservation.cost(m.kind) <= m.maximum for m in reservation.limits)

    def _lease(self, wanted: tuple[Limit, ...], now_s: float) -> dict[str, int]:
        leases = {}
        for limit in wanted:
            free = limit.maximum - self._counters.used(limit, now_s) - self._leased[limit.name]
            if now_s >= self._contended.get(limit.name, now_s) and free * _SCARCE >= limit.maximum:
                leases[limit.name] = free // (_SHARE * len(self._gateways))
        return leases

    def _take_back(self, gateway: _Gateway) -> None:
        for name, amount in gateway.leases.items():
            self._leased[name] -= amount
            if not self._leased[name]:
                del self._leased[name]
        gateway.leases = {}

    def _close(self, gateway: _Gateway, reservation_id: str, used: Amount, now_s: float) -> None:
        if reservation_id in gateway.open:
            gateway.open.discard(reservation_id)
            self._counters.settle(reservation_id, used, now_s)

    def _forget_dead(self, now_s: float) -> None:
        for name, gateway in list(self._gateways.items()):
            if now_s - gateway.heard_s >= self._lease_s:
                del self._gateways[name]
                self._take_back(gateway)
                for reservation_id in gateway.open:
                    self._counters.abandon(reservation_id, now_s)
        self._contended = {name: until for name, until in self._contended.items() if until > now_s}


def _sequences_only(reservation: Reservation) -> Reservation:
    """Its requests and tokens were counted when it was forgotten."""
    return replace(reservation, limits=tuple(m for m in reservation.limits if m.kind is LimitKind.CONCURRENT))

"""A gateway's side of the shared counters: admits from leases where it can, and asks where it must."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from deployments.limits.base import (
    NOTHING,
    WINDOW_S,
    Amount,
    Grant,
    Limit,
    LimitKind,
    LimitState,
    LimitStoreDownError,
    Refusal,
    Reservation,
)
from deployments.limits.shared_counters import GatewayReport, ReportAnswer

_EVERY_S = 0.25  # between reports: how old the shared counts may be, and how long contended reservations wait
_PATIENCE_S = 1.0  # for which a contended reservation is asked for again
_MARGIN = 0.9  # share of a lease's time that is used: the rest is for clocks that do not run alike

_NO_LEASES: dict[str, int] = {}


@dataclass(slots=True)
class _Asked:
    reservation: Reservation
    until_s: float
    outcome: asyncio.Future[Grant | Refusal]


@dataclass(slots=True)
class _Peeked:
    limits: tuple[Limit, ...]
    states: asyncio.Future[tuple[LimitState, ...]]


class LeasedStore:
    """A LimitStore. `ask` sends one report to the shared counters and raises LimitStoreDownError. One report is under
    way at a time; what comes up meanwhile goes with the next one. `gateway`: a name that no other gateway has."""

    def __init__(
        self,
        ask: Callable[[GatewayReport], Awaitable[ReportAnswer]],
        gateway: str,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._gateway = gateway
        self._lease_s = lease_s
        self._clock = clock
        self._number = 0
        self._leases = _NO_LEASES
        self._leases_until_s = 0.0
        self._used: dict[str, int] = {}  # of a limit, as was last answered
        self._spent: Counter[str] = Counter()  # from leases since
        self._open: dict[str, Reservation] = {}
        self._opened: dict[str, Reservation] = {}  # not reported yet
        self._forgotten: dict[str, Reservation] = {}  # by the counters, and not reported again yet
        self._closed: list[tuple[str, Amount]] = []
        self._asked: list[_Asked] = []
        self._peeked: list[_Peeked] = []
        self._lost: GatewayReport | None = None  # whether it arrived is not known
        self._wake = asyncio.Event()
        self._reporting: asyncio.Task[None] | None = None

    async def reserve(self, reservation: Reservation) -> Grant | Refusal:
        """See LimitStore."""
        self._start_reporting()
        if self._covered(reservation):
            return self._admit(reservation)
        asked = _Asked(reservation, self._clock() + _PATIENCE_S, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        self._wake.set()
        try:
            return await asked.outcome
        except asyncio.CancelledError:
            if not asked.outcome.cancelled() and asked.outcome.exception() is None:
                self.settle(reservation, NOTHING)  # it was granted in the same moment
            raise

    def settle(self, reservation: Reservation, used: Amount) -> None:
        """See LimitStore."""
        if reservation.id not in self._open:
            return
        del self._open[reservation.id]
        self._closed.append((reservation.id, used))
        if not self._leases:
            self._wake.set()  # where there are no leases somebody may be waiting for this
            return
        leased = reservation.id in self._opened  # and the lease it came from is still here
        for limit in reservation.limits:
            unused = reservation.cost(limit.kind) - used.of(limit.kind)
            self._spent[limit.name] -= unused
            if leased:
                self._leases[limit.name] = self._leases.get(limit.name, 0) + unused

    async def peek(self, limits: tuple[Limit, ...], org: str) -> tuple[LimitState, ...]:
        """See LimitStore."""
        self._start_reporting()
        peeked = _Peeked(limits, asyncio.get_running_loop().create_future())
        self._peeked.append(peeked)
        self._wake.set()
        return await peeked.states

    async def close(self) -> None:
        """See LimitStore."""
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)
        if self._opened or self._closed or self._leases or self._lost or self._forgotten:
            await self._exchange()

    def _covered(self, reservation: Reservation) -> bool:
        leases = self._leases
        if not leases or self._clock() >= self._leases_until_s:
            return False
        return all(reservation.cost(limit.kind) <= leases.get(limit.name, 0) for limit in reservation.limits)

    def _admit(self, reservation: Reservation) -> Grant:
        self._open[reservation.id] = reservation
        self._opened[reservation.id] = reservation
        states = []
        for limit in reservation.limits:
            name, cost = limit.name, reservation.cost(limit.kind)
            self._leases[name] -= cost
            self._spent[name] += cost
            reset_s = 1.0 if limit.kind is LimitKind.CONCURRENT else WINDOW_S
            states.append(LimitState(limit, max(cost, self._used.get(name, 0) + self._spent[name]), reset_s))
        return Grant(tuple(states))

    def _start_reporting(self) -> None:
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.create_task(self._report_often())

    async def _report_often(self) -> None:
        while True:
            busy = self._opened or self._closed or self._leases or self._asked or self._lost or self._forgotten
            every_s = _EVERY_S if busy else self._lease_s / 4 if self._open else None
            with suppress(TimeoutError):  # not wait_for(), which can lose a cancellation that comes with the event
                async with asyncio.timeout(every_s):
                    await self._wake.wait()
            self._wake.clear()
            if not await self._exchange():
                await asyncio.sleep(_EVERY_S)

    async def _exchange(self) -> bool:
        """One report and its answer. False: the counters cannot be reached, and whoever waits has been told."""
        if self._lost is not None and not await self._repeat():
            self._fail(self._asked, self._peeked)
            self._asked, self._peeked = [], []
            return False
        asked, self._asked = [a for a in self._asked if not a.outcome.done()], []
        peeked, self._peeked = self._peeked, []
        reservations = tuple(a.reservation for a in asked)
        wanted = {m.name: m for reservation in (*self._opened.values(), *reservations) for m in reservation.limits}
        report = GatewayReport(
            self._gateway,
            self._number,
            tuple(self._opened.values()),
            tuple(self._forgotten.values()),
            tuple(self._closed),
            reservations,
            tuple(p.limits for p in peeked),
            tuple(wanted.values()),
        )
        self._number += 1
        self._opened, self._closed, self._leases, self._forgotten = {}, [], _NO_LEASES, {}
        sent_s = self._clock()
        try:
            answer = await self._ask(report)
        except BaseException as error:
            self._lost = report
            self._fail(asked, peeked)
            if isinstance(error, LimitStoreDownError):
                return False
            raise
        self._note_forgotten(report, answer)
        self._on_answer(answer, sent_s, asked, peeked)
        return True

    def _on_answer(self, answer: ReportAnswer, sent_s: float, asked: list[_Asked], peeked: list[_Peeked]) -> None:
        self._leases = dict(answer.leases)
        self._leases_until_s = sent_s + self._lease_s * _MARGIN
        self._used = answer.used
        self._spent.clear()
        now_s = self._clock()
        for a, outcome in zip(asked, answer.outcomes, strict=True):
            if a.reservation.id in answer.contended and now_s < a.until_s and not a.outcome.done():
                self._asked.append(a)
                continue
            if isinstance(outcome, Grant):
                self._open[a.reservation.id] = a.reservation
                if a.outcome.done():
                    self.settle(a.reservation, NOTHING)
            if not a.outcome.done():
                a.outcome.set_result(outcome)
        for p, states in zip(peeked, answer.peeks, strict=True):
            if not p.states.done():
                p.states.set_result(states)

    def _note_forgotten(self, report: GatewayReport, answer: ReportAnswer) -> None:
        """Where the counters had forgotten this gateway, the next report opens anew what ran before this one."""
        if answer.forgotten:
            new = {reservation.id for reservation in (*report.opened, *report.reopened, *report.reservations)}
            new |= self._opened.keys()
            self._forgotten = {name: one for name, one in self._open.items() if name not in new}
            self._wake.set()

    async def _repeat(self) -> bool:
        """Sends the lost report again. Nobody waits for its reservations any more: what it opens is closed."""
        assert self._lost is not None
        try:
            answer = await self._ask(self._lost)
        except LimitStoreDownError:
            return False
        self._note_forgotten(self._lost, answer)
        self._closed += [(reservation.id, NOTHING) for reservation in self._lost.reservations]
        self._lost = None
        return True

    @staticmethod
    def _fail(asked: list[_Asked], peeked: list[_Peeked]) -> None:
        for a in asked:
            if not a.outcome.done():
                a.outcome.set_exception(LimitStoreDownError())
        for p in peeked:
            if not p.states.done():
                p.states.set_exception(LimitStoreDownError())

"""A gateway's side of the hub: admits from leases where it can, asks where it must."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from deployments.limits.base import NOTHING, WINDOW_S, Amount, Claim, Grant, Kind, Meter, Refusal, State, StoreDownError
from deployments.limits.hub import Answer, Report

_EVERY_S = 0.25  # how old the hub's knowledge may be, and how long a contended claim waits for others' leases
_PATIENCE_S = 1.0  # for which a contended claim is asked again
_MARGIN = 0.9  # of a lease's time: the rest is for clocks that do not run alike

_NO_LEASES: dict[str, int] = {}


@dataclass(slots=True)
class _Asked:
    claim: Claim
    until_s: float
    outcome: asyncio.Future[Grant | Refusal]


@dataclass(slots=True)
class _Peeked:
    meters: tuple[Meter, ...]
    states: asyncio.Future[tuple[State, ...]]


class LeasedStore:
    """See base.Store. `ask` sends one report to the hub and raises StoreDownError. One report is under way at a time;
    what comes up meanwhile goes with the next one."""

    def __init__(
        self,
        ask: Callable[[Report], Awaitable[Answer]],
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
        self._used: dict[str, int] = {}  # of a meter, as the hub last said
        self._spent: Counter[str] = Counter()  # from leases since
        self._open: set[str] = set()
        self._opened: dict[str, Claim] = {}  # the hub does not know of these yet
        self._closed: list[tuple[str, Amount]] = []
        self._asked: list[_Asked] = []
        self._peeked: list[_Peeked] = []
        self._lost: Report | None = None  # whether the hub got it is not known
        self._wake = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    async def reserve(self, claim: Claim) -> Grant | Refusal:
        self._start()
        if self._covered(claim):
            return self._admit(claim)
        asked = _Asked(claim, self._clock() + _PATIENCE_S, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        self._wake.set()
        try:
            return await asked.outcome
        except asyncio.CancelledError:
            if not asked.outcome.cancelled() and asked.outcome.exception() is None:
                self.settle(claim, NOTHING)  # it was granted in the same moment
            raise

    def settle(self, claim: Claim, used: Amount) -> None:
        if claim.id not in self._open:
            return
        self._open.discard(claim.id)
        self._closed.append((claim.id, used))
        if not self._leases:
            self._wake.set()  # where there are no leases somebody may be waiting for this
            return
        leased = claim.id in self._opened  # and the lease it came from is still here
        for meter in claim.meters:
            unused = claim.cost(meter.kind) - used.of(meter.kind)
            self._spent[meter.name] -= unused
            if leased:
                self._leases[meter.name] = self._leases.get(meter.name, 0) + unused

    async def peek(self, meters: tuple[Meter, ...], org: str) -> tuple[State, ...]:
        self._start()
        peeked = _Peeked(meters, asyncio.get_running_loop().create_future())
        self._peeked.append(peeked)
        self._wake.set()
        return await peeked.states

    async def close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        if self._opened or self._closed or self._leases or self._lost:
            await self._exchange()

    def _covered(self, claim: Claim) -> bool:
        leases = self._leases
        if not leases or self._clock() >= self._leases_until_s:
            return False
        return all(claim.cost(meter.kind) <= leases.get(meter.name, 0) for meter in claim.meters)

    def _admit(self, claim: Claim) -> Grant:
        self._open.add(claim.id)
        self._opened[claim.id] = claim
        states = []
        for meter in claim.meters:
            name, cost = meter.name, claim.cost(meter.kind)
            self._leases[name] -= cost
            self._spent[name] += cost
            reset_s = 1.0 if meter.kind is Kind.CONCURRENT else WINDOW_S
            states.append(State(meter, max(cost, self._used.get(name, 0) + self._spent[name]), reset_s))
        return Grant(tuple(states))

    def _start(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            busy = self._opened or self._closed or self._leases or self._asked or self._lost
            every_s = _EVERY_S if busy else self._lease_s / 4 if self._open else None
            with suppress(TimeoutError):  # not wait_for(), which can lose a cancellation that comes with the event
                async with asyncio.timeout(every_s):
                    await self._wake.wait()
            self._wake.clear()
            if not await self._exchange():
                await asyncio.sleep(_EVERY_S)

    async def _exchange(self) -> bool:
        """One report and its answer. False: the hub cannot be reached; whoever waits has been told."""
        if self._lost is not None and not await self._repeat():
            self._fail(self._asked, self._peeked)
            self._asked, self._peeked = [], []
            return False
        asked, self._asked = [a for a in self._asked if not a.outcome.done()], []
        peeked, self._peeked = self._peeked, []
        claims = tuple(a.claim for a in asked)
        wanted = {m.name: m for claim in (*self._opened.values(), *claims) for m in claim.meters}
        report = Report(
            self._gateway,
            self._number,
            tuple(self._opened.values()),
            tuple(self._closed),
            claims,
            tuple(p.meters for p in peeked),
            tuple(wanted.values()),
        )
        self._number += 1
        self._opened, self._closed, self._leases = {}, [], _NO_LEASES
        sent_s = self._clock()
        try:
            answer = await self._ask(report)
        except BaseException as error:
            self._lost = report
            self._fail(asked, peeked)
            if isinstance(error, StoreDownError):
                return False
            raise
        self._hear(answer, sent_s, asked, peeked)
        return True

    def _hear(self, answer: Answer, sent_s: float, asked: list[_Asked], peeked: list[_Peeked]) -> None:
        self._leases = dict(answer.leases)
        self._leases_until_s = sent_s + self._lease_s * _MARGIN
        self._used = answer.used
        self._spent.clear()
        now_s = self._clock()
        for a, outcome in zip(asked, answer.outcomes, strict=True):
            if a.claim.id in answer.contended and now_s < a.until_s and not a.outcome.done():
                self._asked.append(a)
                continue
            if isinstance(outcome, Grant):
                self._open.add(a.claim.id)
                if a.outcome.done():
                    self.settle(a.claim, NOTHING)
            if not a.outcome.done():
                a.outcome.set_result(outcome)
        for p, states in zip(peeked, answer.peeks, strict=True):
            if not p.states.done():
                p.states.set_result(states)

    async def _repeat(self) -> bool:
        """Sends the lost report again. Nobody waits for its claims any more: what it opens is closed."""
        assert self._lost is not None
        try:
            await self._ask(self._lost)
        except StoreDownError:
            return False
        self._closed += [(claim.id, NOTHING) for claim in self._lost.claims]
        self._lost = None
        return True

    @staticmethod
    def _fail(asked: list[_Asked], peeked: list[_Peeked]) -> None:
        for a in asked:
            if not a.outcome.done():
                a.outcome.set_exception(StoreDownError())
        for p in peeked:
            if not p.states.done():
                p.states.set_exception(StoreDownError())

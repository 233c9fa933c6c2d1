"""The counters of all limits, and the reservations that are open. Pure: the time is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deployments.limits.base import WINDOW_S, Amount, Grant, Limit, LimitState, Refusal, Reservation
from deployments.limits.window import LimitCounter, new_counter

_NO_LEASES: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class _OpenReservation:
    reservation: Reservation
    taken: tuple[tuple[LimitCounter, int], ...]  # of each limit: the counter and the mark


class Counters:
    """The arithmetic that every store agrees with."""

    def __init__(self) -> None:
        self._by_name: dict[str, LimitCounter] = {}
        self._open: dict[str, _OpenReservation] = {}
        self._swept_s = 0.0

    def reserve(
        self, reservation: Reservation, now_s: float, leased: Mapping[str, int] = _NO_LEASES
    ) -> Grant | Refusal:
        """Takes the amounts of all limits or of none. `leased`: what has been leased to others of a limit, by its name;
        it is not free."""
        if now_s - self._swept_s >= WINDOW_S or now_s < self._swept_s:
            self._sweep(now_s)
        worst: tuple[float, LimitState, int] | None = None
        for limit in reservation.limits:
            cost = reservation.cost(limit.kind)
            its = self._counter(limit)
            used = its.used(now_s) + leased.get(limit.name, 0)
            excess = used + cost - limit.maximum
            if cost and excess > 0:
                wait_s = float("inf") if cost > limit.maximum else its.wait_s(excess, now_s)
                if worst is None or wait_s > worst[0]:
                    worst = wait_s, LimitState(limit, used, its.reset_s(now_s)), cost
        if worst is not None:
            wait_s, state, cost = worst
            return Refusal(
                self.peek(reservation.limits, now_s), state, cost, None if wait_s == float("inf") else wait_s
            )
        return self.take(reservation, now_s)

    def take(self, reservation: Reservation, now_s: float) -> Grant:
        """Takes the amounts whether they fit or not, for what has been admitted already."""
        taken: list[tuple[LimitCounter, int]] = []
        states: list[LimitState] = []
        for limit in reservation.limits:
            its = self._counter(limit)
            taken.append((its, its.add(reservation.cost(limit.kind), now_s)))
            states.append(LimitState(limit, its.used(now_s), its.reset_s(now_s)))
        self._open[reservation.id] = _OpenReservation(reservation, tuple(taken))
        return Grant(tuple(states))

    def settle(self, reservation_id: str, used: Amount, now_s: float) -> None:
        """Ends the reservation. What it holds beyond `used` is given back; what it used beyond its amounts counts from
        now on. Does nothing if it is not open."""
        entry = self._open.pop(reservation_id, None)
        if entry is None:
            return
        reservation = entry.reservation
        for limit, (its, mark) in zip(reservation.limits, entry.taken, strict=True):
            unused = reservation.cost(limit.kind) - used.of(limit.kind)
            if unused < 0:
                self._counter(limit).add(-unused, now_s)  # `its` may have been idle, and forgotten
            else:
                its.give_back(unused, mark)

    def abandon(self, reservation_id: str, now_s: float) -> None:
        """Ends the reservation of a gateway that seems dead: nobody knows what it used, so all of it counts as used,
        for the minute that it counts. Its sequences count no longer."""
        if (entry := self._open.get(reservation_id)) is not None:
            self.settle(reservation_id, entry.reservation.amount, now_s)

    def peek(self, limits: tuple[Limit, ...], now_s: float) -> tuple[LimitState, ...]:
        """The counts of these limits."""
        states = []
        for limit in limits:
            its = self._by_name.get(limit.name)
            states.append(
                LimitState(limit, 0, 0.0) if its is None else LimitState(limit, its.used(now_s), its.reset_s(now_s))
            )
        return tuple(states)

    @property
    def names(self) -> frozenset[str]:
        """The limits that have a counter."""
        return frozenset(self._by_name)

    def used(self, limit: Limit, now_s: float) -> int:
        """What counts of this limit."""
        its = self._by_name.get(limit.name)
        return 0 if its is None else its.used(now_s)

    def _counter(self, limit: Limit) -> LimitCounter:
        its = self._by_name.get(limit.name)
        if its is None:
            its = self._by_name[limit.name] = new_counter(limit.kind)
        return its

    def _sweep(self, now_s: float) -> None:
        """Forgets the counters of idle limits, once a minute."""
        self._swept_s = now_s
        self._by_name = {name: its for name, its in self._by_name.items() if its.used(now_s)}

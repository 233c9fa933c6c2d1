"""All counts of one place and the claims that are open there. Pure: the clock is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deployments.limits.base import WINDOW_S, Amount, Claim, Grant, Meter, Refusal, State
from deployments.limits.window import Counter, counter

_NO_LEASES: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class _Open:
    claim: Claim
    taken: tuple[tuple[Counter, int], ...]  # of each meter: the counter and the mark


class Book:
    """The arithmetic every store agrees with."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}
        self._open: dict[str, _Open] = {}
        self._swept_s = 0.0

    def reserve(self, claim: Claim, now_s: float, leased: Mapping[str, int] = _NO_LEASES) -> Grant | Refusal:
        """`leased`: what others have been promised of a meter, by its name; it is not free."""
        if now_s - self._swept_s >= WINDOW_S or now_s < self._swept_s:
            self._sweep(now_s)
        worst: tuple[float, State, int] | None = None
        for meter in claim.meters:
            cost = claim.cost(meter.kind)
            its = self._counter(meter)
            used = its.used(now_s) + leased.get(meter.name, 0)
            excess = used + cost - meter.limit
            if cost and excess > 0:
                wait_s = float("inf") if cost > meter.limit else its.wait_s(excess, now_s)
                if worst is None or wait_s > worst[0]:
                    worst = wait_s, State(meter, used, its.reset_s(now_s)), cost
        if worst is not None:
            wait_s, state, cost = worst
            return Refusal(self.peek(claim.meters, now_s), state, cost, None if wait_s == float("inf") else wait_s)
        return self.take(claim, now_s)

    def take(self, claim: Claim, now_s: float) -> Grant:
        """As reserve, whether it fits or not: for what has been admitted already."""
        taken: list[tuple[Counter, int]] = []
        states: list[State] = []
        for meter in claim.meters:
            its = self._counter(meter)
            taken.append((its, its.add(claim.cost(meter.kind), now_s)))
            states.append(State(meter, its.used(now_s), its.reset_s(now_s)))
        self._open[claim.id] = _Open(claim, tuple(taken))
        return Grant(tuple(states))

    def settle(self, claim_id: str, used: Amount) -> None:
        """No-op for a claim that is not open."""
        entry = self._open.pop(claim_id, None)
        if entry is None:
            return
        claim = entry.claim
        for meter, (its, mark) in zip(claim.meters, entry.taken, strict=True):
            its.give_back(max(0, claim.cost(meter.kind) - used.of(meter.kind)), mark)

    def peek(self, meters: tuple[Meter, ...], now_s: float) -> tuple[State, ...]:
        states = []
        for meter in meters:
            its = self._counters.get(meter.name)
            states.append(State(meter, 0, 0.0) if its is None else State(meter, its.used(now_s), its.reset_s(now_s)))
        return tuple(states)

    def is_open(self, claim_id: str) -> bool:
        return claim_id in self._open

    def used(self, meter: Meter, now_s: float) -> int:
        its = self._counters.get(meter.name)
        return 0 if its is None else its.used(now_s)

    def _counter(self, meter: Meter) -> Counter:
        its = self._counters.get(meter.name)
        if its is None:
            its = self._counters[meter.name] = counter(meter.kind)
        return its

    def _sweep(self, now_s: float) -> None:
        """Forgets idle meters, once a minute."""
        self._swept_s = now_s
        self._counters = {name: its for name, its in self._counters.items() if its.used(now_s)}

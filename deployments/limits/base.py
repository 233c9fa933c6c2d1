"""The nouns of rate limiting and what a store must do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

WINDOW_S = 60.0


class Kind(StrEnum):
    """What a meter counts: requests and tokens admitted in the last 60 seconds, or requests running now."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENT = "concurrent"


@dataclass(frozen=True, slots=True)
class Meter:
    """One limit. Claims whose meters have the same `name` share its count. `subject` is on whose account, for people:
    "project web in organization acme"."""

    name: str
    kind: Kind
    limit: int
    subject: str


@dataclass(frozen=True, slots=True)
class Amount:
    """What one request takes or took: of each windowed meter, by kind."""

    requests: int
    tokens: int

    def of(self, kind: Kind) -> int:
        return self.requests if kind is Kind.REQUESTS else self.tokens if kind is Kind.TOKENS else 0


NOTHING = Amount(0, 0)


@dataclass(frozen=True, slots=True)
class Claim:
    """A request that wants in: `amount` of every windowed meter and one place of every CONCURRENT one, all or nothing.
    `id` is unique for ever. Meters of one claim all belong to the one organisation `org`."""

    id: str
    org: str
    meters: tuple[Meter, ...]
    amount: Amount

    def cost(self, kind: Kind) -> int:
        return 1 if kind is Kind.CONCURRENT else self.amount.of(kind)


@dataclass(frozen=True, slots=True)
class State:
    """A meter's count at one moment. `reset_s`: until all of it is free again if nobody else comes."""

    meter: Meter
    used: int
    reset_s: float

    @property
    def remaining(self) -> int:
        return max(0, self.meter.limit - self.used)


@dataclass(frozen=True, slots=True)
class Grant:
    """The claim holds its amounts until it is settled. `states` count it, in the order of its meters."""

    states: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing was taken. `state`: the meter that is in the way, the longest if several are. After `retry_after_s` the
    same claim would be granted if nobody else came; None: never, it asks for more than the limit."""

    states: tuple[State, ...]
    state: State
    requested: int
    retry_after_s: float | None


class StoreDownError(Exception):
    """The store cannot be reached. `retry_after_s`: when to ask again."""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


class Store(Protocol):
    """Keeps the counts. Used from one event loop."""

    async def reserve(self, claim: Claim) -> Grant | Refusal:
        """Atomic over all meters. Cancelled half-way, it leaves nothing taken. Raises StoreDownError."""

    def settle(self, claim: Claim, used: Amount) -> None:
        """The claim has ended: its places are free at once, and what it holds beyond `used` is given back, wherever
        in the window it was taken. Never blocks and never fails: a store out of reach hears of it later. A claim that
        is not open (settled before, or returned because this process was thought dead) is left alone."""

    async def peek(self, meters: tuple[Meter, ...], org: str) -> tuple[State, ...]:
        """The counts as known here, taking nothing. Raises StoreDownError."""

    async def close(self) -> None:
        """Tells the store what it has not heard yet."""

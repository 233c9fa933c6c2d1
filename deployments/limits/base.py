"""What rate limiting is about, as plain data, and what a store must do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, Self

from deployments.config.limits import LimitsConfig

WINDOW_S = 60.0


class LimitKind(StrEnum):
    """What a limit counts: requests or tokens admitted in the last 60 seconds, or sequences that run now."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENT = "concurrent"


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `maximum` of a kind. Reservations whose limits have the same `name` share its count. `subject` says for
    people on whose account it is: "project web in organization acme"."""

    name: str
    kind: LimitKind
    maximum: int
    subject: str


@dataclass(frozen=True, slots=True)
class Amount:
    """Requests and tokens that one request takes, or took, of each limit per minute, and how many sequences (its
    choices) run for it at a time."""

    requests: int
    tokens: int
    sequences: int = 1

    def of(self, kind: LimitKind) -> int:
        """What counts under limits of this kind once the request has ended. 0 for CONCURRENT."""
        return self.requests if kind is LimitKind.REQUESTS else self.tokens if kind is LimitKind.TOKENS else 0


NOTHING = Amount(0, 0)


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a request asks for: `amount`, with its sequences under CONCURRENT limits, all or nothing. `id` is never used
    again. All limits of a reservation belong to the organisation `org`."""

    id: str
    org: str
    limits: tuple[Limit, ...]
    amount: Amount

    def cost(self, kind: LimitKind) -> int:
        """What it takes of a limit of this kind."""
        return self.amount.sequences if kind is LimitKind.CONCURRENT else self.amount.of(kind)


@dataclass(frozen=True, slots=True)
class LimitState:
    """The count of a limit at one moment. After `reset_s` seconds all of it is free again, if nobody else comes."""

    limit: Limit
    used: int
    reset_s: float

    @property
    def remaining(self) -> int:
        """What is left of the limit."""
        return max(0, self.limit.maximum - self.used)


@dataclass(frozen=True, slots=True)
class Grant:
    """The reservation holds its amounts until it is settled. `states` include it, in the order of its limits."""

    states: tuple[LimitState, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing was taken. `state` is of the limit that is in the way, for the longest time if several are. After
    `retry_after_s` seconds the same reservation would be granted if nobody else came; None: never, since it asks for
    more than the limit."""

    states: tuple[LimitState, ...]
    state: LimitState
    requested: int
    retry_after_s: float | None


class LimitStoreDownError(Exception):
    """The store cannot be reached. Ask again after `retry_after_s` seconds."""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


class LimitStore(Protocol):
    """Keeps the counts. Used from one event loop."""

    async def reserve(self, reservation: Reservation) -> Grant | Refusal:
        """Takes the amounts of all limits or of none. Cancelled half-way, it leaves nothing taken. Raises
        LimitStoreDownError."""

    def settle(self, reservation: Reservation, used: Amount) -> None:
        """Ends the reservation: its CONCURRENT part is free at once, what it holds beyond `used` is given back,
        wherever in the window it was taken, and what was used beyond it counts from now on. Never blocks and never
        fails: a store out of reach hears of it later. A reservation that is not open (settled before) is left alone."""

    async def peek(self, limits: tuple[Limit, ...], org: str) -> tuple[LimitState, ...]:
        """The counts as they are known here, without taking anything. Raises LimitStoreDownError."""

    async def close(self) -> None:
        """Tells the store what it has not heard yet."""


class ConfiguredStore(LimitStore, Protocol):
    """A LimitStore that a config file can name."""

    @classmethod
    def from_config(cls, config: LimitsConfig, counters: Any) -> Self:
        """`counters`: the handle of the deployment LimitCounters, for stores that need it. Raises ValueError for an
        environment variable that is not set."""

"""What a replica tells gateways about itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica's channel listens.

    `secret` is made when the replica starts. Whoever knows it may connect, so it travels only over Serve's handles and
    is not part of the repr().
    """

    replica_id: str
    host: str
    port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What does not change while a replica runs.

    `max_model_len`: the longest sequence that fits, in tokens: the model's context, or the KV cache if that is smaller.
    `fingerprint` names the weights. `prefix_root`: the fields that go into the digests of its prefix cache beside a
    salt and the tokens (see engine.kv.prefix.root_digest); empty when it caches no prefixes. `startup_s`: how long its
    constructor took.
    """

    max_model_len: int
    fingerprint: str
    address: Address
    prefix_root: tuple[tuple[str, str], ...] = ()
    startup_s: float = 0.0


class ReplicaStatus(StrEnum):
    """Whether a replica takes requests. Streams that are open go on in any case."""

    ACTIVE = "active"
    DRAINED = "drained"  # an operator has taken it out of rotation; the admin API says "draining" while it has streams
    LEAVING = "leaving"  # Serve is stopping it
    SILENT = "silent"  # it does not answer; only gateways say this, of a replica that they know


class UnavailableReason(StrEnum):
    """Why no replica of a pool takes requests, as far as one gateway knows."""

    ASLEEP = "asleep"  # it has none while nobody asks; the next request starts one
    STARTING = "starting"
    FAILING = "failing"  # those that were started did not come up
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What the admin API shows of a replica.

    `streams` counts HTTP requests, whether they wait or run; `running` and `waiting` count sequences.
    """

    replica_id: str
    status: ReplicaStatus
    streams: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a replica is with the requests of all gateways.

    `waiting` and `running` count sequences, `pending_tokens` the prompt tokens that are still to be computed.
    `kv_usage` is the used share of the KV cache, 0 to 1. `done_tokens` counts the tokens of prompts and answers that
    were computed since the replica started.
    """

    waiting: int = 0
    running: int = 0
    pending_tokens: int = 0
    kv_usage: float = 0.0
    done_tokens: int = 0

"""What a replica tells the gateway about itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica's channel listens. `secret` is that replica's own, made when it starts: to know it is to be
    allowed in, so it travels only over Serve's handles, and stays out of logs."""

    replica_id: str
    host: str
    port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """`max_model_len`: the longest sequence that can ever run here: the model's context, or the KV pool if smaller.
    `fingerprint` names the weights. `prefix_root`: what besides a salt and the tokens makes the digests of its prefix
    cache, see engine.kv.prefix.root_digest; empty: it caches no prefixes. `startup_s`: what its constructor took."""

    max_model_len: int
    fingerprint: str
    address: Address
    prefix_root: tuple[tuple[str, str], ...] = ()
    startup_s: float = 0.0


class Duty(StrEnum):
    """Whether a replica takes requests. Streams that it has go on in any case."""

    ACTIVE = "active"
    DRAINED = "drained"  # an operator has taken it out of rotation, and may put it back
    LEAVING = "leaving"  # Serve has taken it out, for good


class Vacancy(StrEnum):
    """Why no replica of a pool takes requests, as far as one gateway knows."""

    ASLEEP = "asleep"  # it has none while nobody asks; the next request starts one
    STARTING = "starting"
    FAILING = "failing"  # those that were started did not come up
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """`streams`: HTTP requests that it serves, or lets wait. `running` and `waiting` count sequences."""

    replica_id: str
    duty: Duty
    streams: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a replica is, whoever's requests they are. `waiting` and `running` count sequences, `pending_tokens`
    those that wait for prefill; `kv_usage` is 0..1. `done_tokens`: of prompts and answers, since it started."""

    waiting: int = 0
    running: int = 0
    pending_tokens: int = 0
    kv_usage: float = 0.0
    done_tokens: int = 0

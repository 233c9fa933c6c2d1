"""The messages of a channel: a kind, then what it carries.

    HELLO     server -> client   schema, nonce
    PROVE     client -> server   nonce, proof
    WELCOME   server -> client   proof
    BEAT      both ways          nothing: silence means that the other end is gone
    OPEN      client -> server   stream id, whether tokens are wanted as they come, requests
    ABORT     client -> server   stream id
    TAKEN     client -> server   stream id, how many of its messages have been used
    ACCEPTED  server -> client   stream id: the requests have come, and are the engine's now
    DELTAS    server -> client   one or more of: stream id, packed deltas
    ERROR     server -> client   stream id, the error in words: the stream's end
    LOAD      server -> client   Load
    STATUS    server -> client   ReplicaStatus: unless it is active, open streams go on and new ones are refused
    PREFIXES  server -> client   two strings of keys (see prefix_news): now in the prefix cache, no longer in it

Stream ids are the client's choice, unique on their connection. A stream ends with the last delta of its last choice or
with ERROR; there is no message that only says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from operator import attrgetter
from typing import Any

from deployments.channel.codec import Decoder
from deployments.channel.replica_info import Load
from engine.types import GenerateRequest, TokenDelta

WINDOW = 64  # messages of one stream that may be unused by the client; until it has used some, new deltas are merged


class Kind(IntEnum):
    """What a message is, see above."""

    HELLO = 1
    PROVE = 2
    WELCOME = 3
    BEAT = 4
    OPEN = 5
    ABORT = 6
    TAKEN = 7
    DELTAS = 8
    ERROR = 9
    LOAD = 10
    STATUS = 11
    PREFIXES = 12
    ACCEPTED = 13


to_request = Decoder(GenerateRequest)
to_load = Decoder(Load)
_to_delta = Decoder(TokenDelta)

SCHEMA = hashlib.sha256(repr((list(Kind), to_request.schema, to_load.schema, _to_delta.schema)).encode()).hexdigest()
"""A digest of all messages' fields. Both ends must have the same: a message carries values without names."""

_first, *_rest = TokenDelta.__match_args__
assert _first == "request_id"  # a number on the wire: which of the stream's requests
_values = attrgetter(*_rest)


def pack_deltas(deltas: Iterable[TokenDelta], numbers: Mapping[str, int]) -> list[tuple[Any, ...]]:
    """Deltas as tuples. `numbers`: each request id's place among the stream's requests, which is sent in its stead."""
    return [(numbers[delta.request_id], *_values(delta)) for delta in deltas]


def unpack_deltas(packed: Iterable[tuple[Any, ...]], request_ids: Sequence[str]) -> list[TokenDelta]:
    """Undoes pack_deltas(). Raises IndexError, TypeError or ValueError for what that cannot have returned."""
    return [_to_delta((request_ids[number], *values)) for number, *values in packed]

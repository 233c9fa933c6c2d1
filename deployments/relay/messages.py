"""What proxies and gateways say to each other once they know each other.

HOLDER  proxy -> gateway   who is calling: the id it asks for leases under
ASK     proxy -> gateway   number, head (see SCOPE), the whole body
CANCEL  proxy -> gateway   number: the client has left
HEAD    gateway -> proxy   number, status, headers, for how long the client may take nothing, or None
BODY    gateway -> proxy   number, bytes, whether more follows
BROKEN  gateway -> proxy   number: nothing more comes of an answer that has not ended
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

SCHEMA = "relay 1"
LEASE_S = 1.0
SCOPE = ("method", "path", "raw_path", "query_string", "root_path", "scheme", "http_version", "headers", "client")
"""What of an ASGI scope is sent, in this order."""


class Word(IntEnum):
    """Apart from channel.messages.Kind, whose greetings are used here too."""

    HOLDER = 32
    ASK = 33
    CANCEL = 34
    HEAD = 35
    BODY = 36
    BROKEN = 37


@dataclass(frozen=True, slots=True)
class Lease:
    """For LEASE_S from when it was asked for, requests below `root_path` may be sent to the gateway at `host`:`port`.
    `gateways`: how many there are."""

    host: str
    port: int
    root_path: str
    gateways: int
    secret: bytes = field(repr=False)

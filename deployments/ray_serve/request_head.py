"""What a request's head may be: the bounds on its headers, and the request id in it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence

MAX_HEADERS = 200  # clients send about 20; more than these is an attack or a mistake
MAX_HEADER_BYTES = 64 * 1024  # of names and values; the same bound as most HTTP servers have
TOO_LARGE = "Request header fields are too large: at most 200 headers and 64 KB in all."

_REQUEST_ID = b"x-request-id"
_USABLE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

Headers = Sequence[tuple[bytes, bytes]]
"""Names, in lower case as ASGI gives them, and values."""


def too_large(headers: Headers) -> bool:
    """Whether the headers are too many or too long. One request id does not count: the server may have put it there."""
    others = [(name, value) for name, value in headers if name != _REQUEST_ID]
    number = len(headers) - (len(headers) - len(others) == 1)
    return number > MAX_HEADERS or sum(len(name) + len(value) for name, value in others) > MAX_HEADER_BYTES


def request_id(headers: Headers) -> bytes:
    """The client's own request id if there is exactly one and it is harmless to log and to return, else a new one."""
    given = [value for name, value in headers if name == _REQUEST_ID]
    if len(given) == 1 and _USABLE_ID.fullmatch(given[0]):
        return given[0]
    return b"req_" + uuid.uuid4().hex.encode()


def with_request_id(headers: Headers, identity: bytes) -> list[tuple[bytes, bytes]]:
    """The same headers with `identity` as the only request id, of a request or of an answer."""
    return [*((name, value) for name, value in headers if name.lower() != _REQUEST_ID), (_REQUEST_ID, identity)]

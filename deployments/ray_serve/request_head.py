"""What a request's head may be: the bounds on its URL and headers, the request id, and headers that clients may not
send."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

MAX_HEADERS = 200  # clients send about 20; more than these is an attack or a mistake
MAX_HEADER_BYTES = 64 * 1024  # of names and values; the same bound as most HTTP servers have
HEAD_S = 10  # for a head to arrive, as in cluster_configs/front: honest clients send it in one piece
MAX_URL_BYTES = 8 * 1024  # of path and query; what nginx and HAProxy take by default
URL_TOO_LONG = "The request URL is too long: at most 8 KB."
TOO_LARGE = "Request header fields are too large: at most 200 headers and 64 KB in all."

_REQUEST_ID = b"x-request-id"
_SESSION_ID = b"x-session-id"
# Serve obeys these, whoever sends them: they lift the server's time limit, keep a request going whose client has left,
# or choose the replica. Serve compares some of them with `-` for `_`.
_SERVES_OWN = frozenset((b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"serve-multiplexed-model-id"))
_SERVES_PREFIX = b"x-serve-router-"
_USABLE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

Headers = Sequence[tuple[bytes, bytes]]
"""Names, in lower case as ASGI gives them, and values."""


def too_large(headers: Headers) -> bool:
    """Whether the headers are too many or too long. One request id does not count: the server may have put it there."""
    others = [(name, value) for name, value in headers if name != _REQUEST_ID]
    number = len(headers) - (len(headers) - len(others) == 1)
    return number > MAX_HEADERS or sum(len(name) + len(value) for name, value in others) > MAX_HEADER_BYTES


def url_too_long(scope: Mapping[str, Any]) -> bool:
    """Whether an ASGI request's path and query are longer than MAX_URL_BYTES."""
    path = scope.get("raw_path") or scope["path"].encode()
    return len(path) + len(scope.get("query_string", b"")) > MAX_URL_BYTES


def for_serve(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers of a client that Serve may see: without those that only Serve's own parts may set, and with the
    session id, which Serve decodes as UTF-8, in that encoding."""
    kept = []
    for name, value in headers:
        plain = name.replace(b"_", b"-")
        if plain in _SERVES_OWN or plain.startswith(_SERVES_PREFIX):
            continue
        if plain == _SESSION_ID and not _is_utf8(value):
            value = value.decode("latin-1").encode()
        kept.append((name, value))
    return kept


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def request_id(headers: Headers) -> bytes:
    """The client's own request id if there is exactly one and it is harmless to log and to return, else a new one."""
    given = [value for name, value in headers if name == _REQUEST_ID]
    if len(given) == 1 and _USABLE_ID.fullmatch(given[0]):
        return given[0]
    return b"req_" + uuid.uuid4().hex.encode()


def with_request_id(headers: Headers, identity: bytes) -> list[tuple[bytes, bytes]]:
    """The same headers with `identity` as the only request id, of a request or of an answer."""
    return [*((name, value) for name, value in headers if name.lower() != _REQUEST_ID), (_REQUEST_ID, identity)]

"""From the wire to a JSON object, with every bound enforced on the way."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Iterable
from typing import Any

import orjson
from starlette.types import Receive

from deployments.api.errors import ApiError, body_too_large, invalid

_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json", re.I)
MAX_DEPTH = 64
# Of one body, so that its Python objects stay within a few times its bytes. A chat of a thousand turns with parts has
# a few thousand of each; 2,048 prompts of token ids are 2,048 arrays.
MAX_CONTAINERS = 32_768
MAX_STRINGS = 262_144
# The closing quote may be missing, so that no start is tried twice: a string without end must not take quadratic time.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_GZIP_WINDOW = 31  # zlib: 15 bits of window, gzip framing


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(receive: Receive, headers: Iterable[tuple[bytes, bytes]], limit: int, timeout_s: float) -> bytes:
    """The raw body, still compressed. Raises ApiError 413 past `limit` bytes and 408 past `timeout_s`."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value[:20]) > limit:
            raise body_too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part: bytes = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise body_too_large(limit)
                parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        text = f"The request body did not arrive within {timeout_s:g} seconds."
        raise ApiError(408, text, headers={"connection": "close"}) from None


def content_coding(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """`gzip` or `identity`. Raises ApiError 415 for a body, if there is one, that is not said to be JSON or is coded
    some other way."""
    codings: list[str] = []
    is_json = is_empty = False  # JSON is to be said: browsers let any page send a body without a type
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == b"content-type":
            is_json = _JSON_TYPE.fullmatch(text.partition(";")[0].strip()) is not None
        if name == b"content-length":
            is_empty = text == "0"
        if name == b"content-encoding":
            codings += [part.strip().lower() for part in text.split(",")]
    if not is_json and not is_empty:
        raise ApiError(415, "The Content-Type header must be application/json.")
    match [c for c in codings if c not in ("", "identity")]:
        case []:
            return "identity"
        case ["gzip" | "x-gzip"]:
            return "gzip"
    message = "Unsupported Content-Encoding: the body may be sent as it is or with gzip, once."
    raise ApiError(415, message, headers={"accept-encoding": "gzip, identity"})


def decode(raw: bytes, coding: str, limit: int) -> dict[str, Any]:
    """The JSON object in `raw`. Raises ApiError. Strict: no NaN, no lone surrogates, UTF-8 only, bounded depth."""
    data = gunzip(raw, limit) if coding == "gzip" else raw
    if not data.strip():
        raise invalid("The request body is empty: a JSON object is expected.")
    _check_size(data)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise invalid(f"We could not parse the JSON body of your request: {error.msg}.") from None
    if not isinstance(value, dict):
        raise invalid("The request body must be a JSON object.")
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH and too_deep(value):
        raise invalid(f"The JSON body of your request has more than {MAX_DEPTH} levels of nesting.")
    return value


def _check_size(data: bytes) -> None:
    """Raises ApiError for more arrays, objects or strings than any honest body has, before they are made."""
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        bare = _STRING.sub(b"", data)  # braces in text do not count
        if bare.count(b"[") + bare.count(b"{") > MAX_CONTAINERS:
            raise invalid(f"The JSON body of your request has more than {MAX_CONTAINERS} arrays and objects.")
    if data.count(b'"') > 2 * MAX_STRINGS and sum(1 for _ in _STRING.finditer(data)) > MAX_STRINGS:
        raise invalid(f"The JSON body of your request has more than {MAX_STRINGS} strings.")


def too_deep(value: Any) -> bool:
    """Whether arrays and objects are nested more than MAX_DEPTH deep. What is deeper, templates could not write."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [inner for inner in level if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def gunzip(raw: bytes, limit: int) -> bytes:
    """Never holds more than `limit` bytes of output, however much the input would expand to."""
    stream = zlib.decompressobj(_GZIP_WINDOW)
    try:
        data = stream.decompress(raw, limit + 1)
    except zlib.error:
        raise invalid("The request body is not valid gzip.") from None
    if len(data) > limit:
        raise body_too_large(limit)
    if not stream.eof:
        raise invalid("The gzip request body is cut short.")
    if stream.unused_data:
        raise invalid("The gzip request body has something after its end.")
    return data

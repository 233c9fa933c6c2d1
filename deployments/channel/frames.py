"""Cuts a byte stream into messages. Each is four bytes of length, big-endian, and that many bytes of msgpack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack

from deployments.channel.codec import plain

MAX_BYTES = 64 * 2**20  # of one message: far above a long prompt or a choice's logprobs
_HEAD = 4

Message = tuple[Any, ...]


class FrameError(Exception):
    """The peer has sent something that is not a message, or a message is too large."""


def encode(message: Message, limit: int = MAX_BYTES) -> bytes:
    """The bytes of a message. Its dataclasses become tuples of their values, see codec.

    Raises FrameError when they are more than `limit` bytes.
    """
    body: bytes = msgpack.packb(message, default=plain)
    if len(body) > limit:
        raise FrameError(f"a message of {len(body)} bytes is too large: at most {limit}")
    return len(body).to_bytes(_HEAD, "big") + body


class Reader:
    """Collects bytes as they arrive and returns whole messages.

    Between two calls it keeps at most one incomplete message, of at most `limit` bytes.
    """

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self.limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yields the messages that are complete now; the caller must exhaust the iterator before the next call.

        Raises FrameError when the bytes are not of this protocol. Nothing can be read after that.
        """
        self._pending += data
        at = 0
        try:
            while len(self._pending) - at >= _HEAD:
                start = at + _HEAD
                size = int.from_bytes(self._pending[at:start], "big")
                if size > self.limit:
                    raise FrameError(f"a message of {size} bytes is too large: at most {self.limit}")
                if len(self._pending) < start + size:
                    return
                at = start + size
                yield _decode(bytes(self._pending[start:at]))
        finally:
            del self._pending[:at]


def _decode(body: bytes) -> Message:
    try:
        message = msgpack.unpackb(body, use_list=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise FrameError(f"not a message: {type(error).__name__}") from None
    if not isinstance(message, tuple) or not message:
        raise FrameError("not a message: no array with a kind")
    return message

"""A byte stream cut into messages: four bytes of length, big-endian, then that many bytes of msgpack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack

from deployments.channel.codec import plain

MAX_BYTES = 64 * 2**20  # of one message: far above a long prompt or a choice's logprobs
_HEAD = 4

Message = tuple[Any, ...]


class FrameError(Exception):
    """These bytes are no message, or one that is too large."""


def encode(message: Message, limit: int = MAX_BYTES) -> bytes:
    """Dataclasses in it go as tuples of their values (see codec). Raises FrameError."""
    body: bytes = msgpack.packb(message, default=plain)
    if len(body) > limit:
        raise FrameError(f"a message of {len(body)} bytes is too large: at most {limit}")
    return len(body).to_bytes(_HEAD, "big") + body


class Reader:
    """Fed bytes as they come; gives whole messages. Holds at most one incomplete message, of at most `limit` bytes,
    beyond what it was last fed."""

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self.limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete now; to be used up before the next call. Raises FrameError when the peer does
        not speak this protocol; nothing can be read after that."""
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

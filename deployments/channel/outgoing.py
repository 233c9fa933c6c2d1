"""Gathers the deltas of many streams into few messages of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from deployments.channel.frames import Message
from deployments.channel.messages import Kind, pack_deltas
from deployments.channel.pacing import PacedStream
from engine.types import TokenDelta

_BYTES = 1 << 20  # estimated size of a message from which on it is sent
_SMALL = 64  # deltas of one stream, up to which they travel in one message


class OpenStream:
    """A stream, its number on the connection, and how many of its messages the client has not used yet."""

    __slots__ = ("number", "numbers", "stream", "unused")

    def __init__(self, number: int, stream: PacedStream) -> None:
        self.number = number
        self.stream = stream
        self.numbers = {request_id: i for i, request_id in enumerate(stream.request_ids)}
        self.unused = 0  # messages sent that the client has not said to have used


class Outgoing:
    """Deltas of many streams, which `send` gets as few messages. `send` may raise FrameError."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._items: list[tuple[int, list[tuple[object, ...]]]] = []
        self._bytes = 0

    def add(self, open_: OpenStream, deltas: list[TokenDelta]) -> None:
        """Adds deltas of one stream. Raises FrameError when one delta alone is more than a message can carry."""
        for part in _parts(deltas):
            size = sum(map(_size, part))
            if self._items and self._bytes + size > _BYTES:
                self.send()
            self._items.append((open_.number, pack_deltas(part, open_.numbers)))
            self._bytes += size
            open_.unused += 1
            if self._bytes > _BYTES:
                self.send()

    def send(self) -> None:
        """Sends all deltas that were added since the last message."""
        if self._items:
            items, self._items, self._bytes = self._items, [], 0
            self._send((Kind.DELTAS, items))


def _parts(deltas: list[TokenDelta]) -> Iterator[list[TokenDelta]]:
    """All deltas together, or one by one when they are many. No part is empty: the client would take it for a delta."""
    if 0 < len(deltas) <= _SMALL:
        yield deltas
    else:
        yield from ([delta] for delta in deltas)


def _size(delta: TokenDelta) -> int:
    """An estimate of how many bytes the delta takes in a message."""
    size = 64 + 5 * len(delta.token_ids) + 2 * len(delta.text)
    for entry in (*delta.logprobs, *delta.prompt_logprobs):
        size += 16 if entry is None else 16 + 16 * len(entry.top)
    return size

"""Streams' deltas on their way into messages of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from deployments.channel.frames import Message
from deployments.channel.messages import Kind, pack_deltas
from deployments.channel.pacing import PacedStream
from engine.types import TokenDelta

_BYTES = 1 << 20  # of a message, about
_SMALL = 64  # deltas of one stream that are sent together


class OpenStream:
    """A stream and how far its reader is."""

    __slots__ = ("number", "numbers", "stream", "unused")

    def __init__(self, number: int, stream: PacedStream) -> None:
        self.number = number
        self.stream = stream
        self.numbers = {request_id: i for i, request_id in enumerate(stream.request_ids)}
        self.unused = 0  # messages sent that the client has not said to have used


class Outgoing:
    """What many streams have got, gathered into few messages."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._items: list[tuple[int, list[tuple[object, ...]]]] = []
        self._bytes = 0

    def add(self, open_: OpenStream, deltas: list[TokenDelta]) -> None:
        """Raises FrameError when one delta alone is more than a message can carry."""
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
        if self._items:
            items, self._items, self._bytes = self._items, [], 0
            self._send((Kind.DELTAS, items))


def _parts(deltas: list[TokenDelta]) -> Iterator[list[TokenDelta]]:
    """Most often all of them at once. Never an empty one: to the client it would be the first sign of life."""
    if 0 < len(deltas) <= _SMALL:
        yield deltas
    else:
        yield from ([delta] for delta in deltas)


def _size(delta: TokenDelta) -> int:
    """About how many bytes."""
    size = 64 + 5 * len(delta.token_ids) + 2 * len(delta.text)
    for entry in (*delta.logprobs, *delta.prompt_logprobs):
        size += 16 if entry is None else 16 + 16 * len(entry.top)
    return size

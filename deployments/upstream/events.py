"""Reads server-sent events: the one parser for upstreams, the command line and the load generators."""

from __future__ import annotations

DONE = b"[DONE]"
"""The data of the event that ends an OpenAI stream."""

_MAX_EVENT_BYTES = 4 * 2**20  # far above a chunk with many logprobs; beyond it, the server does not send events


class EventTooLargeError(ValueError):
    """The server sends an event without an end."""


class EventParser:
    """Turns the bytes of one event stream, however they are cut into chunks, into the data of its events.

    Lines end with LF or CR LF. Comments and all fields but `data` are skipped. An event that has not been ended by an
    empty line when the bytes end is incomplete, and is never given out.
    """

    def __init__(self, max_event_bytes: int = _MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._line = b""  # the beginning of the line whose end has not come yet
        self._data: list[bytes] = []  # the data lines of the event whose end has not come yet

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that this chunk completes, often none. Raises EventTooLargeError."""
        *lines, self._line = (self._line + chunk).split(b"\n")
        complete: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removesuffix(b"\r").removeprefix(b" "))
            elif self._data and line in (b"", b"\r"):
                complete.append(b"\n".join(self._data))
                self._data = []
        if len(self._line) + sum(map(len, self._data)) > self._max_event_bytes:
            raise EventTooLargeError(f"an event of more than {self._max_event_bytes} bytes")
        return complete

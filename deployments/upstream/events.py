"""Reads server-sent events: the one parser for upstreams, the command line and the load generators."""

from __future__ import annotations

DONE = b"[DONE]"
"""The data of the event that ends an OpenAI stream."""

_MAX_EVENT_BYTES = 4 * 2**20  # far above a chunk with many logprobs; beyond it, the server does not send events
_BOM = b"\xef\xbb\xbf"


class EventTooLargeError(ValueError):
    """The server sends an event without an end."""


class EventParser:
    """Turns the bytes of one event stream, however they are cut into chunks, into the data of its events.

    By the standard (https://html.spec.whatwg.org/multipage/server-sent-events.html): lines end with LF, CR LF or CR,
    and a byte order mark may come first. Comments and all fields but `data` are skipped. An event that has not been
    ended by an empty line when the bytes end is incomplete, and is never given out.
    """

    def __init__(self, max_event_bytes: int = _MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._pieces: list[bytes] = []  # of the line whose end has not come yet
        self._data: list[bytes] = []  # the data lines of the event whose end has not come yet
        self._size = 0  # bytes in both
        self._begun = False  # a line has been read
        self._after_cr = False  # a LF that comes now belongs to the line end before it

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that this chunk completes, often none. Raises EventTooLargeError."""
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        if not chunk:
            return []
        self._after_cr = chunk.endswith(b"\r")
        self._size += len(chunk)
        self._pieces.append(chunk)
        complete: list[bytes] = []
        if b"\n" in chunk or b"\r" in chunk:
            lines = b"".join(self._pieces).splitlines()
            self._pieces = [] if chunk.endswith((b"\n", b"\r")) else [lines.pop()]
            for line in lines:
                self._take(line, complete)
            self._size = sum(map(len, self._pieces)) + sum(map(len, self._data))
        if self._size > self._max_event_bytes:
            raise EventTooLargeError(f"an event of more than {self._max_event_bytes} bytes")
        return complete

    def _take(self, line: bytes, complete: list[bytes]) -> None:
        if not self._begun:
            self._begun = True
            line = line.removeprefix(_BOM)
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif line == b"data":
            self._data.append(b"")
        elif self._data and not line:
            complete.append(b"\n".join(self._data))
            self._data = []

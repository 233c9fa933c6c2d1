"""HTTP/1.1 as far as a load generator needs it: one POST or GET at a time on a connection, answers in pieces.

Written on asyncio's protocols because a piece of an answer then costs one callback, without waking a task: the
generator shares its cores with the server it measures.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from load_tests.errors import LoadError

Receiver = Callable[[int, bytes, float], None]  # status, a piece of the body, when it came

_MAX_HEAD = 65536


class ProtocolError(ConnectionError):
    """The peer does not speak HTTP/1.1."""


class StaleConnection(ConnectionError):
    """An idle connection turned out to be closed before any answer came: the request may be sent again."""


class ResponseParser:
    """One answer. Not for HEAD requests."""

    __slots__ = ("_buffer", "_left", "_read", "done", "keep_alive", "status")

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self.keep_alive = True
        self._buffer = b""
        self._left = 0
        self._read: Callable[[bytes], tuple[bytes, bytes] | None] = self._head

    def feed(self, data: bytes) -> bytes:
        """The body bytes in `data`. Raises ProtocolError."""
        data = self._buffer + data if self._buffer else data
        pieces = []
        while data and not self.done:
            step = self._read(data)
            if step is None:
                break
            piece, data = step
            if piece:
                pieces.append(piece)
        self._buffer = data
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def eof(self) -> None:
        """The peer closed: the end of a body without a length, a failure of any other."""
        self.keep_alive = False
        if self._read == self._until_closed:
            self.done = True

    # Each reader takes (all of) the bytes there are and gives (body bytes, what is left), or None for "more needed".

    def _head(self, data: bytes) -> tuple[bytes, bytes] | None:
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            if len(data) > _MAX_HEAD:
                raise ProtocolError("endless headers")
            return None
        first, *lines = head.split(b"\r\n")
        version, _, status = first.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not status[:3].isdigit():
            raise ProtocolError("not HTTP/1.1")
        self.status = int(status[:3])
        if self.status < 200:
            return b"", rest
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self.keep_alive = version != b"HTTP/1.0" and headers.get(b"connection", b"").lower() != b"close"
        if headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked"):
            self._read = self._chunk_size
        elif b"content-length" in headers:
            self._left = _number(headers[b"content-length"], 10)
            self._read, self.done = self._counted, self._left == 0
        elif self.status in (204, 304):
            self.done = True
        else:
            self._read = self._until_closed
        return b"", rest

    def _chunk_size(self, data: bytes) -> tuple[bytes, bytes] | None:
        line, found, rest = data.partition(b"\r\n")
        if not found:
            if len(data) > _MAX_HEAD:
                raise ProtocolError("endless chunk size")
            return None
        self._left = _number(line.partition(b";")[0].strip(), 16)
        self._read = self._chunk if self._left else self._trailer
        return b"", rest

    def _chunk(self, data: bytes) -> tuple[bytes, bytes] | None:
        if len(data) < self._left:
            self._left -= len(data)
            return data, b""
        piece, rest = data[: self._left], data[self._left :]
        self._left = 0
        self._read = self._chunk_end
        return piece, rest

    def _chunk_end(self, data: bytes) -> tuple[bytes, bytes] | None:
        if len(data) < 2:
            return None
        if data[:2] != b"\r\n":
            raise ProtocolError("chunk without an end")
        self._read = self._chunk_size
        return b"", data[2:]

    def _trailer(self, data: bytes) -> tuple[bytes, bytes] | None:
        line, found, rest = data.partition(b"\r\n")
        if not found:
            return None
        self.done = not line
        return b"", rest

    def _counted(self, data: bytes) -> tuple[bytes, bytes] | None:
        piece, rest = data[: self._left], data[self._left :]
        self._left -= len(piece)
        self.done = self._left == 0
        return piece, rest

    def _until_closed(self, data: bytes) -> tuple[bytes, bytes] | None:
        return data, b""


class Connection(asyncio.Protocol):
    """One at a time: request() again only after its future is done. The future's failure: ConnectionError, or what
    the receiver raised."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = ResponseParser()
        self._receiver: Receiver | None = None
        self._answer: asyncio.Future[None] | None = None
        self._used = False

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def request(self, data: bytes, receiver: Receiver) -> asyncio.Future[None]:
        assert self._transport is not None
        self._parser = ResponseParser()
        self._receiver = receiver
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        at = time.perf_counter()
        answer, receiver = self._answer, self._receiver
        if answer is None or answer.done() or receiver is None:
            self.close()  # an answer nobody asked for
            return
        parser = self._parser
        try:
            body = parser.feed(data)
            if body:
                receiver(parser.status, body, at)
        except Exception as error:
            answer.set_exception(error)
            self.close()
            return
        if parser.done:
            self._finish(answer)

    def eof_received(self) -> None:
        self._parser.eof()
        if self._answer is not None and self._parser.done and not self._answer.done():
            self._finish(self._answer)

    def connection_lost(self, exc: Exception | None) -> None:
        answer, self._transport = self._answer, None
        if answer is not None and not answer.done():
            stale = self._used and self._parser.status == 0
            answer.set_exception(StaleConnection() if stale else ConnectionResetError())

    def _finish(self, answer: asyncio.Future[None]) -> None:
        if not self._parser.keep_alive:
            self.close()
        self._used = True
        answer.set_result(None)


class Origin:
    """A server's address, resolved once, and its idle connections. As many connections as there are requests at a
    time: nothing here waits for another request."""

    def __init__(self, url: str, *, keep_alive: bool = True) -> None:
        """Raises LoadError for what is not an http(s) URL. Without `keep_alive` each request connects anew."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise LoadError(f"{url}: not an http:// or https:// address")
        self._name = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._keep_alive = keep_alive
        self._idle: list[Connection] = []
        self._address: str | None = None
        self.host_header = parts.netloc.rpartition("@")[2]

    async def request(self, data: bytes, receiver: Receiver) -> None:
        """Sends a whole request; returns when the answer is complete. Raises OSError (ConnectionError among them) and
        what the receiver raises. Cancelling it closes the connection."""
        while True:
            connection = self._take_idle() or await self._connect()
            try:
                await connection.request(data, receiver)
            except StaleConnection:
                continue
            except BaseException:
                connection.close()
                raise
            if self._keep_alive and connection.usable:
                self._idle.append(connection)
            else:
                connection.close()
            return

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        if self._address is None:
            infos = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
        else:
            addresses = [self._address]
        for address in addresses:
            try:
                _, connection = await loop.create_connection(
                    Connection,
                    address,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._name if self._tls else None,
                )
            except OSError:
                if address == addresses[-1]:
                    raise
            else:
                self._address = address
                return connection
        raise OSError("no address")


def _number(text: bytes, base: int) -> int:
    try:
        value = int(text, base)
    except ValueError:
        value = -1
    if value < 0:
        raise ProtocolError("bad length")
    return value

"""HTTP/1.1 as far as a load generator needs it: one POST or GET at a time on a connection, answers in pieces.

httptools parses. It stands on asyncio's protocols, rather than on a whole HTTP client, because a piece of an answer
then costs one callback, without waking a task: the generator shares its cores with the server it measures.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from load_tests.errors import LoadError

Receiver = Callable[[int, bytes, float], None]  # status, a piece of the body, when it came


class ProtocolError(ConnectionError):
    """The peer does not speak HTTP/1.1."""


class StaleConnection(ConnectionError):
    """An idle connection turned out to be closed before any answer came: the request may be sent again."""


class ResponseParser:
    """One answer. Not for HEAD requests."""

    __slots__ = ("_framed", "_parser", "_pieces", "done", "keep_alive", "status")

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self.keep_alive = True
        self._framed = False  # its length or its chunks say where the body ends; otherwise the connection's end does
        self._pieces: list[bytes] = []
        self._parser = HttpResponseParser(self)

    def feed(self, data: bytes) -> bytes:
        """The body bytes in `data`. Raises ProtocolError."""
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if not self.done:
                raise ProtocolError(str(error)) from None
            self.keep_alive = False  # something follows the answer
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def eof(self) -> None:
        """The peer closed: the end of a body without a length, a failure of any other."""
        self.keep_alive = False
        if self.status and not self._framed:
            self.done = True

    # What httptools calls. An answer below 200 is followed by the one that counts.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self.status:
            self.keep_alive = self._parser.should_keep_alive()
            self.done = True


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

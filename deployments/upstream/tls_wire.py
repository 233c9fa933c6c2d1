"""To an external server over TLS: HTTP/2 where the server offers it as the connection is made, else HTTP/1.1."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from deployments.config.upstream import UpstreamConfig
from deployments.upstream.errors import UpstreamBusyError, UpstreamDownError, UpstreamSlowError
from deployments.upstream.http2 import Http2Connection, Http2Error, Http2Stream, UnprocessedError

if TYPE_CHECKING:
    from deployments.upstream.wires import Reply, Wire


class TlsWire:
    """See wires.Wire. A connection has as many streams as the server lets it; then one more is made. Certificates are
    checked against certifi's authorities, or those in the file that SSL_CERT_FILE names. `http1` makes what is used
    from then on when a server does not offer HTTP/2."""

    def __init__(
        self, config: UpstreamConfig, headers: Mapping[str, str], http1: Callable[[ssl.SSLContext], Wire]
    ) -> None:
        self._config = config
        parts = urlsplit(config.base_url)
        self._host, self._port, self._path = parts.hostname or "", parts.port or 443, parts.path.rstrip("/")
        fixed = {":method": "POST", ":scheme": "https", ":authority": parts.netloc.rpartition("@")[2]}
        self._fixed, self._headers = list(fixed.items()), list(headers.items())
        self._context = httpx.create_ssl_context()
        self._context.set_alpn_protocols(["h2", "http/1.1"])
        self._connections: list[Http2Connection] = []
        self._connecting: asyncio.Task[None] | None = None
        self._make_http1 = http1
        self._http1: Wire | None = None

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[Reply]:
        """Raises UpstreamBusyError too."""
        with self._words():
            asked = None if self._http1 is not None else await self._ask(path, body)
        if asked is None:
            assert self._http1 is not None
            async with self._http1.post(path, body) as reply:
                yield reply
            return
        stream, headers = asked
        try:
            with self._words():
                yield _Reply(stream, headers, self._config.idle_s)
        finally:
            stream.close()

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        for connection in self._connections:
            connection.close()
        if self._http1 is not None:
            await self._http1.close()

    async def _ask(self, path: str, body: bytes) -> tuple[Http2Stream, Mapping[str, str]] | None:
        """A stream, and its answer's headers. None: the server speaks HTTP/1.1."""
        headers = [*self._fixed, (":path", self._path + path), *self._headers]
        for last in (False, True):
            connection = await self._connection()
            if connection is None:
                return None
            stream = None
            try:
                stream = connection.open(headers, body)
                return stream, await stream.answer(self._config.idle_s)
            except BaseException as error:
                if stream is not None:
                    stream.close()
                if isinstance(error, TimeoutError):
                    connection.retire()  # it may be the connection that is dead
                if last or not isinstance(error, UnprocessedError):
                    raise
        raise AssertionError

    async def _connection(self) -> Http2Connection | None:
        """One with room. None: the server speaks HTTP/1.1."""
        while self._http1 is None:
            if (found := self._with_room()) is not None:
                return found
            if self._connecting is None:
                if len(self._connections) >= self._config.max_connections:
                    raise UpstreamBusyError("all connections are full", None)
                self._connecting = asyncio.create_task(self._connect())
                self._connecting.add_done_callback(self._connected)
            await asyncio.shield(self._connecting)  # all who wait fail together, not one after another
        return None

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._config.connect_s):
            transport, connection = await loop.create_connection(
                Http2Connection, self._host, self._port, ssl=self._context
            )
        if connection.spoken:
            self._connections.append(connection)
        else:
            transport.close()
            self._http1 = self._make_http1(self._context)

    def _connected(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # whoever still waits has it

    def _with_room(self) -> Http2Connection | None:
        self._connections = [connection for connection in self._connections if connection.alive]
        return next((connection for connection in self._connections if connection.has_room), None)

    @contextmanager
    def _words(self) -> Iterator[None]:
        """What goes wrong, as the caller knows it."""
        try:
            yield
        except TimeoutError:
            raise UpstreamSlowError(f"upstream {self._config.name}: nothing has come in time") from None
        except (Http2Error, OSError) as error:
            raise UpstreamDownError(f"upstream {self._config.name}: {type(error).__name__}: {error}") from None


class _Reply:
    def __init__(self, stream: Http2Stream, headers: Mapping[str, str], idle_s: float) -> None:
        self.status = int(headers[":status"])
        self.headers = headers
        self._stream = stream
        self._idle_s = idle_s

    def chunks(self) -> AsyncIterator[bytes]:
        return self._stream.chunks(self._idle_s)

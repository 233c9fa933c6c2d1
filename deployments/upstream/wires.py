"""How requests reach an external server. One interface: over TLS HTTP/2 where that is offered, else HTTP/1.1 by
aiohttp, which takes a fifth of httpx's CPU time for a streamed answer. httpx is for what goes through a proxy."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx

from deployments.config.upstream import UpstreamConfig
from deployments.upstream.errors import UpstreamDownError, UpstreamSlowError
from deployments.upstream.tls_wire import TlsWire


class Reply(Protocol):
    """`headers` are found whatever the case of their names."""

    status: int
    headers: Mapping[str, str]

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Read to its end, it leaves a connection that can be used again."""


class Wire(Protocol):
    """Pooled connections to one server. Raises UpstreamSlowError and UpstreamDownError, within the context too."""

    def post(self, path: str, body: bytes) -> AbstractAsyncContextManager[Reply]:
        """A JSON body to where `path` is behind the base URL."""

    async def close(self) -> None: ...


def wire(config: UpstreamConfig, transport: httpx.AsyncBaseTransport | None = None) -> Wire:
    """`transport` replaces the network. Raises ValueError when the server's key is not to be had."""
    parts = urlsplit(config.base_url)
    through_proxy = {parts.scheme, "all"} & getproxies().keys() and not proxy_bypass(parts.hostname or "")
    if transport is not None or through_proxy:
        return HttpxWire(config, transport)
    if parts.scheme == "http":
        return PlainWire(config)
    return TlsWire(config, _headers(config), lambda tls: PlainWire(config, tls))


def _headers(config: UpstreamConfig) -> dict[str, str]:
    secret = config.secret()
    headers = {"content-type": "application/json", "accept": "text/event-stream"}
    return {**headers, "authorization": f"Bearer {secret}"} if secret else headers


class HttpxWire:
    """See Wire. HTTP/1.1: of HTTP/2, httpx does not reset streams that are given up."""

    def __init__(self, config: UpstreamConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._name = config.name
        self._http = httpx.AsyncClient(
            base_url=config.base_url,
            headers=_headers(config),
            limits=httpx.Limits(
                max_connections=config.max_connections, max_keepalive_connections=config.max_connections
            ),
            timeout=httpx.Timeout(config.idle_s, connect=config.connect_s, pool=config.connect_s),
            transport=transport,
        )

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[Reply]:
        try:
            async with self._http.stream("POST", path, content=body) as response:
                yield _HttpxReply(response)
        except httpx.TimeoutException as error:
            raise UpstreamSlowError(f"upstream {self._name}: {type(error).__name__}") from None
        except httpx.HTTPError as error:
            raise UpstreamDownError(f"upstream {self._name}: {type(error).__name__}") from None

    async def close(self) -> None:
        await self._http.aclose()


class _HttpxReply:
    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers
        self._chunks = response.aiter_bytes()

    def chunks(self) -> AsyncIterator[bytes]:
        return self._chunks


class PlainWire:
    """See Wire. HTTP/1.1, with TLS by `tls`."""

    def __init__(self, config: UpstreamConfig, tls: ssl.SSLContext | None = None) -> None:
        self._name = config.name
        self._base = config.base_url.rstrip("/")
        self._session = aiohttp.ClientSession(
            headers={**_headers(config), "accept-encoding": "identity"},
            connector=aiohttp.TCPConnector(limit=config.max_connections, ssl=tls or True),
            timeout=aiohttp.ClientTimeout(total=None, connect=config.connect_s, sock_read=config.idle_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[Reply]:
        try:
            async with self._session.post(self._base + path, data=body, allow_redirects=False) as response:
                yield _PlainReply(response)
        except aiohttp.ServerTimeoutError as error:
            raise UpstreamSlowError(f"upstream {self._name}: {type(error).__name__}") from None
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise  # the caller's own
            raise UpstreamDownError(f"upstream {self._name}: {type(error).__name__}") from None

    async def close(self) -> None:
        await self._session.close()


class _PlainReply:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self._chunks = response.content.iter_any()

    def chunks(self) -> AsyncIterator[bytes]:
        return self._chunks

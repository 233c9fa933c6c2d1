"""Asks one external server, over HTTP/1.1."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import certifi
import orjson

from deployments.config.upstream import UpstreamConfig
from deployments.upstream.answer import UpstreamAnswer
from deployments.upstream.errors import UpstreamDownError, UpstreamFullError, UpstreamSlowError
from deployments.upstream.refusal import refusal
from deployments.upstream.stream import UpstreamStream


@dataclass(frozen=True, slots=True)
class UpstreamCall:
    """A client's request on its way out. `path` is behind the base URL. `fields` are those of the client's body that
    are understood here, `max_tokens` what its answer may have here. Choice `i * n + j` belongs to `request_ids[i]`.
    """

    path: str
    fields: Mapping[str, Any]
    request_ids: Sequence[str]
    n: int
    max_tokens: int


class Upstream:
    """One external server. Lives on one event loop, on which it is made.

    A request has a connection of its own, which is used again after a complete answer and closed after any other: so
    the server stops generating when nobody waits for it. Proxies of the environment are used. Certificates are checked
    against certifi's authorities, or those in the file that SSL_CERT_FILE names.
    """

    def __init__(self, config: UpstreamConfig) -> None:
        """Raises ValueError when the server's key is not to be had."""
        self.config = config
        secret = config.secret()
        self._base_url = config.base_url.rstrip("/")
        self._proxy = _proxy(config.base_url)
        self._free = asyncio.Semaphore(config.max_connections)
        self._session = aiohttp.ClientSession(
            headers={
                "content-type": "application/json",
                "accept": "text/event-stream",
                "accept-encoding": "identity",
                **({"authorization": f"Bearer {secret}"} if secret else {}),
            },
            connector=aiohttp.TCPConnector(limit=0, ssl=_tls(config.base_url)),  # `_free` bounds them
            timeout=aiohttp.ClientTimeout(total=None, connect=config.connect_s, sock_read=config.idle_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def begin(self, call: UpstreamCall, first_token_s: float | None = None) -> UpstreamStream:
        """An answer that has begun: its first deltas are there. Raises UpstreamError and its kin, and
        ContextLengthError. Its first event has `first_token_s` seconds to come, and never more than its own
        `first_token_s`. A model that thinks sends events without text first, for as long as it likes.
        """
        within_s = self.config.first_token_s if first_token_s is None else min(first_token_s, self.config.first_token_s)
        deadline_s = asyncio.get_running_loop().time() + within_s
        await self._connection(min(self.config.connect_s, within_s))
        stream: UpstreamStream | None = None
        try:
            async with asyncio.timeout_at(deadline_s):
                with self._translated_errors():
                    response = await self._session.post(
                        self._base_url + call.path,
                        data=orjson.dumps(self._body(call)),
                        allow_redirects=False,
                        proxy=self._proxy,
                    )
                    answer = UpstreamAnswer(call.request_ids, call.n)
                    stream = UpstreamStream(response, answer, self._translated_errors, self._free.release)
                    if response.status != 200:
                        raise await refusal(response, self.config.name)
                    if response.content_type != "text/event-stream":
                        raise UpstreamDownError("an answer that is no event stream")
                await stream.first_event()
            await stream.begin()
        except BaseException as error:
            if stream is not None:
                stream.close()
            else:
                self._free.release()
            if isinstance(error, TimeoutError):
                raise UpstreamSlowError(f"upstream {self.config.name}: no first token") from None
            raise
        return stream

    async def close(self) -> None:
        """Closes all connections; open streams break off."""
        await self._session.close()

    async def _connection(self, within_s: float) -> None:
        """Waits for one of ours to be free. Raises UpstreamFullError."""
        try:
            async with asyncio.timeout(within_s):
                await self._free.acquire()
        except TimeoutError:
            message = f"upstream {self.config.name}: all {self.config.max_connections} connections are in use"
            raise UpstreamFullError(message) from None

    def _body(self, call: UpstreamCall) -> dict[str, Any]:
        fields = {name: value for name, value in call.fields.items() if name not in self.config.dropped}
        fields = {name: value for name, value in fields.items() if value is not None}
        limit = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
        for name in ("max_completion_tokens", "max_tokens"):  # the same setting: OpenAI refuses both together
            fields.pop(name, None)
        model = str(fields.get("model"))
        return {
            **fields,
            limit: call.max_tokens,
            "model": self.config.models.get(model, model),
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """What aiohttp raises, as the errors of this package."""
        try:
            yield
        except aiohttp.ServerTimeoutError as error:
            raise UpstreamSlowError(f"upstream {self.config.name}: {type(error).__name__}") from None
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise  # the caller's own
            raise UpstreamDownError(f"upstream {self.config.name}: {type(error).__name__}: {error}") from None


def _proxy(url: str) -> str | None:
    """The proxy that the environment names for this URL. aiohttp's `trust_env` would also send passwords of .netrc."""
    parts = urlsplit(url)
    if proxy_bypass(parts.hostname or ""):
        return None
    proxies = getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")


def _tls(url: str) -> ssl.SSLContext | bool:
    if not url.startswith("https:"):
        return True
    return ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or certifi.where())

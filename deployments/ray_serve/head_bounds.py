"""Bounds on what uvicorn, which serves HTTP in Serve's proxy and in each gateway, keeps of a request's head.

uvicorn joins the pieces of a head until it is complete, however long it is and however long that takes. Anybody who
reaches the port could fill the memory of a process by that, without an API key.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn.protocols.http.auto as uvicorn_http
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments.ray_serve.refusals import envelope
from deployments.ray_serve.request_head import HEAD_S, MAX_HEADER_BYTES, TOO_LARGE

_MOST_BYTES = 2 * MAX_HEADER_BYTES  # above what a middleware refuses in better words, with room for the URL
_TOO_SLOW = f"The head of the request did not arrive within {HEAD_S} seconds."
_PHRASES = {408: "Request Timeout", 431: "Request Header Fields Too Large"}


class BoundedHeadProtocol(HttpToolsProtocol):
    """Closes connections whose client sends more than _MOST_BYTES without completing a head, a piece of a body, or a
    body with its trailers, or takes longer than HEAD_S seconds for a head."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._incomplete_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """The first head is expected now."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is expected any more."""
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Hands `data` to the parser, which calls the methods below."""
        self._incomplete_bytes += len(data)
        super().data_received(data)
        if self._incomplete_bytes > _MOST_BYTES:
            self._refuse(431, TOO_LARGE)

    def on_message_begin(self) -> None:
        """The first byte of a head has come."""
        super().on_message_begin()
        if self._deadline is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """A head is complete."""
        self._expect_nothing()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body has come."""
        self._incomplete_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has come to its end."""
        self._incomplete_bytes = 0
        super().on_message_complete()

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_S, self._on_late)

    def _expect_nothing(self) -> None:
        self._incomplete_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_late(self) -> None:
        if self._incomplete_bytes:
            self._refuse(408, _TOO_SLOW)
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, status: int, text: str) -> None:
        if self.transport.is_closing():
            return
        body = envelope(text, "invalid_request_error")
        head = f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


def bound_heads() -> None:
    """Makes every uvicorn server that this process starts later use BoundedHeadProtocol."""
    uvicorn_http.AutoHTTPProtocol = BoundedHeadProtocol

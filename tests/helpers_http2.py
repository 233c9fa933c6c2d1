"""An HTTP/2 server with TLS that misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from helpers_tls import self_signed
from helpers_upstream import GOOD

EVENTS = [(":status", "200"), ("content-type", "text/event-stream")]


@dataclass
class Http2Server:
    """`on_request(link, stream id, body)` is called for each complete request."""

    on_request: Callable[[Link, int, dict[str, Any]], None]
    max_streams: int = 100
    links: list[Link] = field(default_factory=list)
    base: str = ""
    cert: Path | None = None


class Link(asyncio.Protocol):
    """One connection. `resets`: streams that the client has given up."""

    def __init__(self, server: Http2Server) -> None:
        self.server = server
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        self.bodies: dict[int, bytes] = {}
        self.resets: list[int] = []
        self.headers: dict[int, dict[str, str]] = {}
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.server.links.append(self)
        self.h2.initiate_connection()
        self.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: self.server.max_streams})
        self.flush()

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            match event:
                case h2.events.RequestReceived():
                    self.bodies[event.stream_id] = b""
                    self.headers[event.stream_id] = dict(event.headers)  # type: ignore[arg-type]
                case h2.events.DataReceived():
                    self.bodies[event.stream_id] += event.data
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case h2.events.StreamEnded():
                    self.server.on_request(self, event.stream_id, json.loads(self.bodies[event.stream_id]))
                case h2.events.StreamReset():
                    self.resets.append(event.stream_id)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True

    def flush(self) -> None:
        self.transport.write(self.h2.data_to_send())

    def good(self, stream_id: int) -> None:
        """A complete answer."""
        self.begin(stream_id)
        self.h2.send_data(stream_id, b"".join(item for item in GOOD if isinstance(item, bytes)), end_stream=True)
        self.flush()

    def begin(self, stream_id: int, data: bytes = b"") -> None:
        self.h2.send_headers(stream_id, EVENTS)
        if data:
            self.h2.send_data(stream_id, data)
        self.flush()

    def refuse(self, stream_id: int) -> None:
        self.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
        self.flush()

    def go_away(self, last_stream_id: int) -> None:
        """And then it is gone."""
        self.h2.close_connection(last_stream_id=last_stream_id)
        self.flush()
        self.transport.close()


@asynccontextmanager
async def http2_server(folder: Path, server: Http2Server) -> AsyncIterator[Http2Server]:
    tls = self_signed(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    context.set_alpn_protocols(["h2"])
    listening = await asyncio.get_running_loop().create_server(lambda: Link(server), "127.0.0.1", 0, ssl=context)
    server.base, server.cert = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1", tls.cert
    try:
        yield server
    finally:
        listening.close()
        for link in server.links:
            link.transport.abort()

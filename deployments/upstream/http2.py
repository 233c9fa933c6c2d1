"""HTTP/2 to an external server: one TLS connection, on which many streams travel.

`h2` knows the protocol and does no input or output; this is the rest. What matters here, and ready-made clients lack: a
stream that is given up is reset, so that the server stops generating for nobody; what one stream leaves unread takes
nothing of its neighbours' window; and a stream that stalls fails alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import cast

import h2.config
import h2.connection
import h2.events
import h2.exceptions
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

_WINDOW = 1 << 24  # of the connection: streams that are read slowly must not keep the others from being read
_STREAM_WINDOW = 1 << 20


class Http2Error(Exception):
    """The stream broke off, or the connection did."""


class UnprocessedError(Http2Error):
    """The server says that it has not looked at the request: it may be sent again."""


class Http2Connection(asyncio.Protocol):
    """Made by loop.create_connection(). Unless `spoken`, the server has not chosen HTTP/2, and nothing has been
    sent."""

    def __init__(self) -> None:
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self._h2 = h2.connection.H2Connection(config)
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, Http2Stream] = {}
        self._retired = False
        self.spoken = False  # ALPN has chosen it

    @property
    def has_room(self) -> bool:
        """Whether it takes one more stream now."""
        if self._retired or self._transport is None or self._transport.is_closing():
            return False
        return self._h2.open_outbound_streams < self._h2.remote_settings.max_concurrent_streams

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._retired

    def open(self, headers: Sequence[tuple[str, str]], body: bytes) -> Http2Stream:
        """A POST. Raises Http2Error when there is no room."""
        if not self.has_room:
            raise UnprocessedError("no room on the connection")
        number = self._h2.get_next_available_stream_id()
        stream = self._streams[number] = Http2Stream(self, number, body)
        self._h2.send_headers(number, headers)
        stream.go_on()
        self._flush()
        return stream

    def retire(self) -> None:
        """No new streams; it ends with the last of them."""
        self._retired = True
        if not self._streams:
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # --------------------------------------------------------------------------------------------- for its streams

    def send(self, number: int, body: bytes) -> bytes:
        """As much of the body as the server's windows let through; the rest is given back. The last part ends it."""
        while body:
            size = min(self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size, len(body))
            if size <= 0:
                return body
            self._h2.send_data(number, body[:size], end_stream=size == len(body))
            body = body[size:]
        return body

    def used(self, number: int, size: int) -> None:
        if self._transport is not None and number in self._streams:
            self._h2.acknowledge_received_data(size, number)
            self._flush()

    def part(self, number: int, ended: bool, unread: int) -> None:
        """The stream is no longer read. `unread`: bytes that have come and count against the connection's window."""
        if self._streams.pop(number, None) is None or self._transport is None:
            return
        try:
            if unread:
                self._h2.acknowledge_received_data(unread, number)
            if not ended:
                self._h2.reset_stream(number, ErrorCodes.CANCEL)
        except h2.exceptions.ProtocolError:  # it has ended meanwhile
            pass
        self._flush()
        if self._retired and not self._streams:
            self.close()

    def _flush(self) -> None:
        if self._transport is not None and (data := self._h2.data_to_send()):
            self._transport.write(data)

    # ------------------------------------------------------------------------------------------ called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        tls = transport.get_extra_info("ssl_object")
        self.spoken = tls is not None and tls.selected_alpn_protocol() == "h2"
        if not self.spoken:
            return
        self._h2.initiate_connection()
        self._h2.update_settings({SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW})
        self._h2.increment_flow_control_window(_WINDOW)
        self._flush()

    def data_received(self, data: bytes) -> None:
        try:
            for event in self._h2.receive_data(data):
                self._handle(event)
        except h2.exceptions.ProtocolError as error:
            self._retired = True
            self._flush()  # says why
            self._fail(Http2Error(f"no HTTP/2: {type(error).__name__}"))
            self.close()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(Http2Error("the connection is lost"))

    def _handle(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived():
                if (stream := self._streams.get(event.stream_id)) is not None:
                    stream.begin({str(name): str(value) for name, value in event.headers})
            case h2.events.DataReceived():
                if (stream := self._streams.get(event.stream_id)) is not None:
                    stream.feed(event.data, event.flow_controlled_length)
                else:  # given up; the connection's window is everybody's
                    self._h2.increment_flow_control_window(event.flow_controlled_length)
            case h2.events.StreamEnded():
                if (stream := self._streams.get(event.stream_id)) is not None:
                    stream.end()
            case h2.events.StreamReset():
                if (stream := self._streams.get(event.stream_id)) is not None:
                    refused = event.error_code == ErrorCodes.REFUSED_STREAM
                    stream.fail((UnprocessedError if refused else Http2Error)("the stream was reset"))
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                for stream in self._streams.values():
                    stream.go_on()
            case h2.events.ConnectionTerminated():
                self._retired = True
                last = event.last_stream_id or 0
                for number, stream in self._streams.items():
                    if number > last:
                        stream.fail(UnprocessedError("the server closes the connection"))

    def _fail(self, error: Http2Error) -> None:
        for stream in self._streams.values():
            stream.fail(error)


class Http2Stream:
    """One request and its answer, to be used by one reader and then closed."""

    def __init__(self, connection: Http2Connection, number: int, body: bytes) -> None:
        self._connection = connection
        self._number = number
        self._body = body
        self._headers: Mapping[str, str] | None = None
        self._chunks: list[tuple[bytes, int]] = []  # with what they take of the window
        self._ended = False
        self._closed = False
        self._error: Http2Error | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def answer(self, within_s: float) -> Mapping[str, str]:
        """The answer's headers, `:status` among them, names in small letters. Raises Http2Error and TimeoutError."""
        while self._headers is None:
            await self._news(within_s)
        return self._headers

    async def chunks(self, within_s: float) -> AsyncIterator[bytes]:
        """Its body. `within_s`: until the next piece. Raises Http2Error and TimeoutError."""
        while True:
            while not self._chunks:
                if self._ended:
                    return
                await self._news(within_s)
            taken, self._chunks = self._chunks, []
            self._connection.used(self._number, sum(size for _, size in taken))
            yield b"".join(data for data, _ in taken)

    def close(self) -> None:
        """Resets it unless it has ended. Not a coroutine: nothing can cut it short."""
        if not self._closed:
            self._closed = True
            over = (self._ended and not self._body) or self._error is not None
            self._connection.part(self._number, over, sum(size for _, size in self._chunks))

    async def _news(self, within_s: float) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(within_s):
            await self._waiter

    # ---------------------------------------------------------------------------------------- for the connection

    def go_on(self) -> None:
        """There may be room for more of the body."""
        if self._body:
            self._body = self._connection.send(self._number, self._body)

    def begin(self, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self._wake()

    def feed(self, data: bytes, size: int) -> None:
        self._chunks.append((data, size))
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def fail(self, error: Http2Error) -> None:
        """After what has come."""
        if not self._ended:
            self._error = self._error or error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

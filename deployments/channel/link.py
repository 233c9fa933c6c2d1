"""What both ends of a connection do: cut bytes into messages, send heartbeats, and close when the peer sends none."""

from __future__ import annotations

import asyncio
from typing import cast

from deployments.channel import frames
from deployments.channel.frames import FrameError, Message, Reader
from deployments.channel.messages import Kind
from deployments.observe.log import log

BEAT_S = 1.0  # seconds between two heartbeats
PATIENCE = 10  # intervals of BEAT_S without a byte from the peer, after which it counts as gone
HANDSHAKE_BEATS = 5  # intervals of BEAT_S that a handshake may take
HANDSHAKE_BYTES = 1024  # the largest message during the handshake; the longest real one has some 100 bytes
_BUFFER_BYTES = 256 * 1024  # unsent bytes from which on the connection counts as congested


class Link(asyncio.Protocol):
    """One connection. Before `ready`, only short messages are read from the peer: it has not proved who it is."""

    def __init__(self, beat_s: float = BEAT_S) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = Reader(HANDSHAKE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._beat_s = beat_s
        self._silent = 0  # beats
        self.ready = False
        self.congested = False  # more than _BUFFER_BYTES are unsent

    # --------------------------------------------------------------------------------- for the two ends to define

    def on_connected(self) -> None:
        """The connection is there; the handshake is not done yet."""

    def on_received(self, message: Message) -> None:
        """A message other than a heartbeat has arrived.

        FrameError, ValueError, TypeError, IndexError and KeyError mean that it is invalid: they end the connection.
        """
        raise NotImplementedError

    def on_lost(self) -> None:
        """The connection is gone; called once, also when this end has closed it."""

    def on_writable(self) -> None:
        """The connection is no longer congested."""

    # ------------------------------------------------------------------------------------------------- for callers

    def send(self, message: Message) -> None:
        """Sends a message, unless the connection is gone. Raises FrameError when the message is too large."""
        if self._transport is not None:
            self._transport.write(frames.encode(message))

    def close(self) -> None:
        """Closes the connection after all unsent bytes have been sent."""
        if self._transport is not None:
            self._transport.close()

    def drop(self, reason: str) -> None:
        """Closes the connection at once, and logs the reason."""
        if self._transport is not None and not self._transport.is_closing():
            log.info("channel connection with %s dropped: %s", self._transport.get_extra_info("peername"), reason)
            self._transport.abort()

    def now_ready(self) -> None:
        """Notes that the peer has proved who it is."""
        self.ready = True
        self._silent = 0
        self._reader.limit = frames.MAX_BYTES

    # ------------------------------------------------------------------------------------------ called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        self._timer = self._loop.call_later(self._beat_s, self._beat)
        self.on_connected()

    def data_received(self, data: bytes) -> None:
        """Passes on each complete message, and closes the connection at the first invalid one."""
        if self.ready:
            self._silent = 0
        try:
            for message in self._reader.feed(data):
                if message[0] != Kind.BEAT:
                    self.on_received(message)
        except (FrameError, ValueError, TypeError, IndexError, KeyError) as error:
            self.drop(f"{type(error).__name__}: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self.on_lost()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self.congested = True

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self.congested = False
        self.on_writable()

    def _beat(self) -> None:
        # Counted in beats of our own rather than seconds: a process that was stopped itself finds nobody gone.
        self._silent += 1
        if self._silent > (PATIENCE if self.ready else HANDSHAKE_BEATS):
            self.drop("nothing has come for too long")
            return
        if self.ready:
            self.send((Kind.BEAT,))
        self._timer = self._loop.call_later(self._beat_s, self._beat)

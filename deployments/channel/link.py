"""What both ends of a connection do: cut bytes into messages, say that they live, notice when the other does not."""

from __future__ import annotations

import asyncio
from typing import cast

from deployments.channel import frames
from deployments.channel.frames import FrameError, Message, Reader
from deployments.channel.messages import Kind
from deployments.observe.log import log

BEAT_S = 1.0
PATIENCE = 10  # beats that may fail to come
HANDSHAKE_BEATS = 5  # that a handshake may take
HANDSHAKE_BYTES = 1024  # of its longest message
_BUFFER_BYTES = 256 * 1024  # unsent: beyond it, what can wait does


class Link(asyncio.Protocol):
    """One connection. Nothing but the handshake's short messages is read from a peer before `ready`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = Reader(HANDSHAKE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._silent = 0  # beats
        self.ready = False
        self.congested = False  # more is unsent than should be

    # --------------------------------------------------------------------------------- for the two ends to define

    def on_connected(self) -> None:
        """The connection is there; the handshake is not done yet."""

    def on_received(self, message: Message) -> None:
        """May raise FrameError, ValueError, TypeError or IndexError for a message that makes no sense: that ends the
        connection."""
        raise NotImplementedError

    def on_lost(self) -> None:
        """The connection is gone; called once, also when this end has closed it."""

    def on_writable(self) -> None:
        """Less is unsent than should wait again: what could wait may go."""

    # ------------------------------------------------------------------------------------------------- for callers

    def send(self, message: Message) -> None:
        """Does nothing on a connection that is gone. Raises FrameError when the message is too large to be sent."""
        if self._transport is not None:
            self._transport.write(frames.encode(message))

    def close(self) -> None:
        """Sends what is unsent, then closes."""
        if self._transport is not None:
            self._transport.close()

    def drop(self, reason: str) -> None:
        """Closes at once."""
        if self._transport is not None and not self._transport.is_closing():
            log.info("channel connection with %s dropped: %s", self._transport.get_extra_info("peername"), reason)
            self._transport.abort()

    def now_ready(self) -> None:
        """The peer has proved who it is."""
        self.ready = True
        self._silent = 0
        self._reader.limit = frames.MAX_BYTES

    # ------------------------------------------------------------------------------------------ called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        self._timer = self._loop.call_later(BEAT_S, self._beat)
        self.on_connected()

    def data_received(self, data: bytes) -> None:
        if self.ready:
            self._silent = 0
        try:
            for message in self._reader.feed(data):
                if message[0] != Kind.BEAT:
                    self.on_received(message)
        except (FrameError, ValueError, TypeError, IndexError, KeyError) as error:
            self.drop(f"{type(error).__name__}: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self.on_lost()

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
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
        self._timer = self._loop.call_later(BEAT_S, self._beat)

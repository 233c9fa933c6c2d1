"""The two ends of a connection, which pass messages on only after both have proved that they know the secret."""

from __future__ import annotations

from deployments.channel import handshake
from deployments.channel.frames import FrameError, Message
from deployments.channel.link import Link
from deployments.channel.messages import Kind


class ListeningLink(Link):
    """The replica's end. `schema` is a digest of all messages' fields; the other end must have the same."""

    def __init__(self, secret: bytes, schema: str, beat_s: float) -> None:
        super().__init__(beat_s)
        self._secret = secret
        self._schema = schema
        self._nonce = handshake.nonce()

    def on_message(self, message: Message) -> None:
        """A message has arrived after the handshake. May raise what Link.on_received() may."""
        raise NotImplementedError

    def on_ready(self) -> None:
        """The handshake is done: the peer has proved that it knows the secret."""

    def on_connected(self) -> None:
        """Begins the handshake."""
        self.send((Kind.HELLO, self._schema, self._nonce))

    def on_received(self, message: Message) -> None:
        """Takes the next step of the handshake. Raises FrameError when the peer fails it."""
        if self.ready:
            self.on_message(message)
            return
        match message:
            case (Kind.PROVE, bytes(nonce), proof) if handshake.is_nonce(nonce):
                if handshake.proves(proof, handshake.client_proof(self._secret, self._nonce, nonce)):
                    self.send((Kind.WELCOME, handshake.server_proof(self._secret, self._nonce, nonce)))
                    self.now_ready()
                    self.on_ready()
                    return
        raise FrameError("the secret has not been proved")


class CallingLink(Link):
    """The gateway's end. For `schema` see ListeningLink."""

    def __init__(self, secret: bytes, schema: str, beat_s: float) -> None:
        super().__init__(beat_s)
        self._secret = secret
        self._schema = schema
        self._wanted = b""  # the peer's proof

    def on_message(self, message: Message) -> None:
        """A message has arrived after the handshake. May raise what Link.on_received() may."""
        raise NotImplementedError

    def on_ready(self) -> None:
        """The handshake is done: the peer has proved that it knows the secret."""

    def on_received(self, message: Message) -> None:
        """Takes the next step of the handshake. Raises FrameError when the peer fails it."""
        if self.ready:
            self.on_message(message)
            return
        match message:
            case (Kind.HELLO, schema, bytes(server)) if not self._wanted and handshake.is_nonce(server):
                if schema != self._schema:
                    raise FrameError("the peer is of another version")
                nonce = handshake.nonce()
                self._wanted = handshake.server_proof(self._secret, server, nonce)
                self.send((Kind.PROVE, nonce, handshake.client_proof(self._secret, server, nonce)))
            case (Kind.WELCOME, proof) if self._wanted and handshake.proves(proof, self._wanted):
                self.now_ready()
                self.on_ready()
            case _:
                raise FrameError("a message of no known kind")

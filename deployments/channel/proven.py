"""The two ends of a connection until both have proved that they know the secret, see handshake."""

from __future__ import annotations

from deployments.channel import handshake
from deployments.channel.frames import FrameError, Message
from deployments.channel.link import Link
from deployments.channel.messages import Kind


class ListeningLink(Link):
    """The end that was called. `schema`: what the messages look like; ends of different ones do not talk."""

    def __init__(self, secret: bytes, schema: str) -> None:
        super().__init__()
        self._secret = secret
        self._schema = schema
        self._nonce = handshake.nonce()

    def told(self, message: Message) -> None:
        """As Link.received(), once the peer is known."""
        raise NotImplementedError

    def welcomed(self) -> None:
        """The peer is known now."""

    def opened(self) -> None:
        self.send((Kind.HELLO, self._schema, self._nonce))

    def received(self, message: Message) -> None:
        if self.ready:
            self.told(message)
            return
        match message:
            case (Kind.PROVE, bytes(nonce), proof) if handshake.is_nonce(nonce):
                if handshake.proves(proof, handshake.client_proof(self._secret, self._nonce, nonce)):
                    self.send((Kind.WELCOME, handshake.server_proof(self._secret, self._nonce, nonce)))
                    self.now_ready()
                    self.welcomed()
                    return
        raise FrameError("the secret has not been proved")


class CallingLink(Link):
    """The end that called."""

    def __init__(self, secret: bytes, schema: str) -> None:
        super().__init__()
        self._secret = secret
        self._schema = schema
        self._wanted = b""  # the peer's proof

    def told(self, message: Message) -> None:
        """As Link.received(), once the peer is known."""
        raise NotImplementedError

    def welcomed(self) -> None:
        """The peer is known now."""

    def received(self, message: Message) -> None:
        if self.ready:
            self.told(message)
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
                self.welcomed()
            case _:
                raise FrameError("a message of no known kind")

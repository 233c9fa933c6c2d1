"""The replica's end of a channel: serves an engine's streams to the gateways that know its secret."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from itertools import count

from deployments.channel.errors import DrainingError, to_words
from deployments.channel.frames import FrameError, Message
from deployments.channel.link import BEAT_S
from deployments.channel.messages import SCHEMA, WINDOW, Kind, to_request
from deployments.channel.outgoing import OpenStream, Outgoing
from deployments.channel.pacing import PacedStream, Pacer
from deployments.channel.prefix_news import PrefixNews
from deployments.channel.proven import ListeningLink
from deployments.channel.replica_info import Load, ReplicaStatus
from deployments.observe.log import log
from engine.async_engine import AsyncEngine
from engine.errors import EngineDeadError, EngineError, QueueFullError
from engine.types import GenerateRequest

_LOAD_EVERY_S = 0.05  # seconds between two looks at the load: what policies compare is at most this old
_ALL = ("0.0.0.0", "::")
_PREFIXES_EVERY = 10  # every how many of these looks the prefix cache is compared too, which takes longer


class ChannelServer:
    """Listens for gateways. A replica makes one, on its event loop.

    A connection that ends aborts its streams, so that their blocks are free within a step. `max_streams` bounds the
    open streams of all gateways together.
    """

    def __init__(self, engine: AsyncEngine, secret: bytes, max_streams: int, beat_s: float = BEAT_S) -> None:
        self._engine = engine
        self._pacer = Pacer(asyncio.get_running_loop())
        self.secret = secret
        self.beat_s = beat_s
        self._max_streams = max_streams
        self._links: set[ServerLink] = set()
        self._server: asyncio.Server | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._no_streams = asyncio.Event()  # no stream is open
        self._no_streams.set()
        self._no_links = asyncio.Event()  # no gateway is connected
        self._no_links.set()
        self._num_streams = 0
        self.load = Load()
        self.prefixes = PrefixNews()
        self.status = ReplicaStatus.ACTIVE
        self._eviction: asyncio.TimerHandle | None = None

    async def start(self, host: str, ports: tuple[int, int] | None = None) -> int:
        """Starts to listen on a free port of `host`, of the range `ports` (first and last) if there is one. Returns it.

        Where `host` is not an address of this machine (behind NAT, or in a container whose node has another one), it
        listens on all addresses. Raises OSError when all `ports` are taken.
        """
        self._server = await self._listen(host, ports)
        self._publishing = asyncio.create_task(self._publish())
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _listen(self, host: str, ports: tuple[int, int] | None) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        first, last = ports or (0, 0)
        for port in range(first, last + 1):
            try:
                return await loop.create_server(partial(ServerLink, self), host, port)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL and host not in _ALL:
                    log.info("%s is no address of this machine: the channel listens on all addresses", host)
                    return await self._listen(_ALL[ip_address(host).version == 6], ports)
                if error.errno != errno.EADDRINUSE:
                    raise
        raise OSError(errno.EADDRINUSE, f"all of the channel_ports {first} to {last} are taken")

    async def drain(self, within_s: float) -> None:
        """Takes no new streams any more, and tells gateways so.

        Returns when the open streams have ended, or after `within_s` seconds.
        """
        self._set_status(ReplicaStatus.LEAVING)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._no_streams.wait(), within_s)

    def take_out(self, within_s: float | None) -> None:
        """Takes no new streams until put_back().

        Streams that are still open after `within_s` seconds are handed back to the gateways, which go on with them on
        other replicas. None: they stay until they end.
        """
        if self.status is ReplicaStatus.LEAVING:
            return
        self._set_status(ReplicaStatus.DRAINED)
        self._cancel_eviction()
        if within_s is not None:
            self._eviction = asyncio.get_running_loop().call_later(within_s, self._evict)

    def put_back(self) -> None:
        """Takes new streams again, unless it is leaving."""
        if self.status is ReplicaStatus.DRAINED:
            self._cancel_eviction()
            self._set_status(ReplicaStatus.ACTIVE)

    @property
    def num_streams(self) -> int:
        """How many streams of all gateways are open."""
        return self._num_streams

    @property
    def links(self) -> tuple[ServerLink, ...]:
        """The connections of all gateways, also those whose handshake is not done."""
        return tuple(self._links)

    async def close(self, within_s: float) -> None:
        """Ends every connection, after all unsent messages have been sent or `within_s` seconds have passed."""
        self._cancel_eviction()
        if self._publishing is not None:
            self._publishing.cancel()
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            link.finish()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._no_links.wait(), within_s)
        for link in list(self._links):
            link.drop("closing")

    # ---------------------------------------------------------------------------------------------- for the links

    def open(
        self, requests: tuple[GenerateRequest, ...], on_ready: Callable[[PacedStream], None], whole: bool
    ) -> PacedStream:
        """Has the engine run the requests. The caller ends the stream with close_stream().

        Raises DrainingError, QueueFullError beyond `max_streams`, and EngineDeadError. The engine's other refusals
        become the stream's error.
        """
        if self.status is not ReplicaStatus.ACTIVE:
            raise DrainingError
        if self._num_streams >= self._max_streams:
            raise QueueFullError(f"{self._num_streams} requests are being served: max_ongoing_requests")
        stream = self._pacer.open(requests, on_ready, whole)
        try:
            self._engine.open(requests, self._pacer, stream.call)
        except EngineDeadError:
            self._pacer.close(stream)
            raise
        self._num_streams += 1
        self._no_streams.clear()
        return stream

    def close_stream(self, stream: PacedStream) -> None:
        """Aborts the requests of a stream that still run, and forgets the stream."""
        self._pacer.close(stream)
        self._engine.abort(*stream.request_ids)
        self._num_streams -= 1
        if not self._num_streams:
            self._no_streams.set()

    def on_link_connected(self, link: ServerLink) -> None:
        """Counts a new connection, before its handshake."""
        self._links.add(link)
        self._no_links.clear()

    def on_link_lost(self, link: ServerLink) -> None:
        """Counts a connection as ended."""
        self._links.discard(link)
        if not self._links:
            self._no_links.set()

    def _set_status(self, status: ReplicaStatus) -> None:
        self.status = status
        self._tell((Kind.STATUS, status))

    def _evict(self) -> None:
        for link in list(self._links):
            link.hand_back()

    def _cancel_eviction(self) -> None:
        if self._eviction is not None:
            self._eviction.cancel()
            self._eviction = None

    def _tell(self, message: Message) -> None:
        for link in self._links:
            if link.ready:
                link.send(message)

    async def _publish(self) -> None:
        """Tells the gateways how busy the engine is, and what is in its prefix cache, whenever that has changed.

        Runs until cancelled.
        """
        for turn in count():
            stats = self._engine.stats()
            done = stats.prompt_tokens + stats.generated_tokens
            load = Load(stats.waiting, stats.running, stats.pending_tokens, round(stats.kv_usage, 3), done)
            if load != self.load:
                self.load = load
                self._tell((Kind.LOAD, load))
            if turn % _PREFIXES_EVERY == 0 and (news := self.prefixes.update(self._engine.engine.cached_prefixes())):
                self._tell((Kind.PREFIXES, *news))
            await asyncio.sleep(_LOAD_EVERY_S)


class ServerLink(ListeningLink):
    """One gateway's connection. Deltas that its streams get in one step are sent as one message."""

    def __init__(self, server: ChannelServer) -> None:
        super().__init__(server.secret, SCHEMA, server.beat_s)
        self._server = server
        self._open: dict[int, OpenStream] = {}
        self._numbers: dict[PacedStream, int] = {}
        self._due: dict[int, None] = {}  # streams with something to take, oldest first
        self._flushing = False

    def on_connected(self) -> None:
        """Counts the connection, and begins the handshake."""
        self._server.on_link_connected(self)
        super().on_connected()

    def on_ready(self) -> None:
        """Tells the gateway what has been published so far."""
        self.send((Kind.LOAD, self._server.load))
        self.send((Kind.PREFIXES, self._server.prefixes.all, b""))
        self.send((Kind.STATUS, self._server.status))

    def on_message(self, message: Message) -> None:
        """Opens or aborts a stream, or notes how far the gateway has read one."""
        match message:
            case (Kind.OPEN, int(number), bool(streamed), tuple(requests)):
                self._begin(number, streamed, requests)
            case (Kind.ABORT, int(number)):
                self._end(number)
            case (Kind.TAKEN, int(number), int(count)):
                if (open_ := self._open.get(number)) is not None:
                    open_.unused -= count
                    if number in self._due:
                        self._flush_soon()
            case _:
                raise FrameError("a message of no known kind")

    def on_writable(self) -> None:
        """Sends what had to wait while the connection was congested."""
        self._flush_soon()

    def on_lost(self) -> None:
        """Aborts all streams of this connection."""
        self._server.on_link_lost(self)
        for number in list(self._open):
            self._end(number)

    def finish(self) -> None:
        """Closes the connection after the deltas that its streams have now have been sent."""
        self._flush()
        self.close()

    def hand_back(self) -> None:
        """Ends all streams with DrainingError. The gateway knows enough to go on with them on other replicas."""
        self._flush()
        for number in list(self._open):
            self._refuse(number, DrainingError())
            self._end(number)

    # ------------------------------------------------------------------------------------------------------ steps

    def _begin(self, number: int, streamed: bool, requests: tuple[tuple[object, ...], ...]) -> None:
        if number in self._open:
            raise FrameError("a stream id that is in use")
        decoded = tuple(map(to_request, requests))
        try:
            stream = self._server.open(decoded, self._ready, whole=not streamed)
        except (DrainingError, EngineError) as error:
            self._refuse(number, error)
            return
        self._open[number] = OpenStream(number, stream)
        self._numbers[stream] = number
        self.send((Kind.ACCEPTED, number))

    def _end(self, number: int) -> None:
        """Forgets a stream and aborts what still runs of it. Does nothing for an unknown number."""
        open_ = self._open.pop(number, None)
        if open_ is not None:
            self._due.pop(number, None)
            del self._numbers[open_.stream]
            self._server.close_stream(open_.stream)

    def _refuse(self, number: int, error: BaseException) -> None:
        self.send((Kind.ERROR, number, *to_words(error)))

    def _ready(self, stream: PacedStream) -> None:
        number = self._numbers.get(stream)
        if number is not None:
            self._due[number] = None
            self._flush_soon()

    def _flush_soon(self) -> None:
        """Flushes when all streams have got their deltas of this step."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self.congested:
            return  # until on_writable(); what comes meanwhile is taken together
        frame = Outgoing(self.send)
        for number in list(self._due):
            open_ = self._open[number]
            if open_.unused >= WINDOW:
                continue  # until TAKEN
            del self._due[number]
            stream = open_.stream
            error = stream.error
            try:
                frame.add(open_, stream.take())
            except FrameError as too_large:
                error = too_large
            if error is not None:
                frame.send()
                self._refuse(number, error)
            if error is not None or stream.ended:
                self._end(number)
        frame.send()

"""The gateway's end of a channel: a connection to one replica, and the streams of deltas that it carries."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import count

from deployments.channel.errors import StreamLostError, from_words
from deployments.channel.frames import FrameError, Message
from deployments.channel.link import BEAT_S
from deployments.channel.merging import merged
from deployments.channel.messages import SCHEMA, WINDOW, Kind, to_load, unpack_deltas
from deployments.channel.prefix_news import split
from deployments.channel.proven import CallingLink
from deployments.channel.replica_info import Address, Load, ReplicaStatus
from deployments.observe.log import log
from engine.types import GenerateRequest, TokenDelta

_CONNECT_S = 5.0
BACKOFF_S = 0.05  # seconds before a connection is tried again; doubles with each failure
_MAX_BACKOFF = 20  # times BACKOFF_S, after many failures


class ChannelClient:
    """Keeps one connection to one replica, on the event loop it was made on, until closed.

    `on_change` is called whenever `usable` may have changed. `on_prefixes` is called with the keys that the replica's
    prefix cache has gained and lost; on a new connection, with all keys that it has. `on_answer` is called with the
    number of completion tokens of each choice that has ended. `weights` names those of the replica. `num_streams`
    counts the streams that are open here, and `queued_tokens` the prompt tokens of those that have no delta yet; other
    gateways' streams are in neither.
    """

    def __init__(
        self,
        address: Address,
        on_change: Callable[[], None],
        rng: random.Random,
        on_prefixes: Callable[[list[bytes], list[bytes]], None] = lambda added, removed: None,
        on_answer: Callable[[int], None] = lambda tokens: None,
        weights: str = "",
        backoff_s: float = BACKOFF_S,
        beat_s: float = BEAT_S,
    ) -> None:
        self.address = address
        self.on_prefixes = on_prefixes
        self.on_answer = on_answer
        self.weights = weights
        self.beat_s = beat_s
        self.load = Load()
        self.num_streams = 0
        self.queued_tokens = 0
        self.status = ReplicaStatus.ACTIVE
        self._on_change = on_change
        self._backoff_s = backoff_s
        self._rng = rng
        self._link: ClientLink | None = None
        self._retired = False
        self._keeping = asyncio.create_task(self._keep_connected())

    @property
    def connected(self) -> bool:
        """Whether the connection is there and its handshake is done."""
        return self._link is not None and self._link.ready

    @property
    def usable(self) -> bool:
        """Whether the replica would take a request from this client now."""
        return self.connected and self.status is ReplicaStatus.ACTIVE and not self._retired

    def open(
        self, requests: tuple[GenerateRequest, ...], streamed: bool, new_tokens: int | None = None
    ) -> ReplicaStream:
        """Sends the requests to the replica and returns the stream of their deltas.

        `streamed`: the replica sends deltas as they come; otherwise it sends the first one at once, and others twice a
        second.
        `new_tokens`: how many prompt tokens are not believed to be in the replica's prefix cache; None means all.
        Raises StreamLostError when there is no connection.
        """
        if self._link is None or not self._link.ready:
            raise StreamLostError("no connection to the replica")
        return ReplicaStream(self, self._link, requests, streamed, new_tokens)

    def retire(self) -> None:
        """Opens no more streams, and closes the connection when the last one ends.

        To be called when Serve no longer names the replica.
        """
        self._retired = True
        self._close_if_idle()

    def close(self) -> None:
        """Closes the connection at once. Open streams end with StreamLostError."""
        self._retired = True
        self._keeping.cancel()
        if self._link is not None:
            self._link.drop("closing")

    # --------------------------------------------------------------------------------------------- for its streams

    def on_stream_opened(self, tokens: int) -> None:
        """Counts a new stream and its `tokens` prompt tokens."""
        self.num_streams += 1
        self.queued_tokens += tokens

    def on_stream_begun(self, tokens: int) -> None:
        """Takes the prompt tokens of a stream that has its first delta, or ends without one, off the queued ones."""
        self.queued_tokens -= tokens

    def on_stream_closed(self) -> None:
        """Counts a stream as closed."""
        self.num_streams -= 1
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._retired and not self.num_streams:
            self.close()

    # ------------------------------------------------------------------------------------------------ for its link

    def on_changed(self) -> None:
        """Passes on that `usable` may have changed."""
        self._on_change()

    def on_disconnected(self, link: ClientLink) -> None:
        """Forgets a connection that has ended. _keep_connected() opens the next one."""
        if self._link is link:
            self._link = None
        if link.ready and not self._retired:
            log.warning("lost the connection to replica %s", self.address.replica_id)
        self._on_change()

    async def _keep_connected(self) -> None:
        loop, delay_s = asyncio.get_running_loop(), self._backoff_s
        while not self._retired:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    _, link = await loop.create_connection(
                        lambda: ClientLink(self), self.address.host, self.address.port
                    )
            except OSError:  # TimeoutError is one
                pass
            else:
                self._link = link
                await link.gone.wait()
                if link.ready:
                    delay_s = self._backoff_s
            await asyncio.sleep(delay_s * self._rng.uniform(0.5, 1.5))
            delay_s = min(2 * delay_s, _MAX_BACKOFF * self._backoff_s)


class ClientLink(CallingLink):
    """One connection to the replica."""

    def __init__(self, client: ChannelClient) -> None:
        super().__init__(client.address.secret, SCHEMA, client.beat_s)
        self.gone = asyncio.Event()
        self._client = client
        self._streams: dict[int, ReplicaStream] = {}
        self._numbers = count()

    def on_ready(self) -> None:
        """Tells the client that the replica can be used."""
        self._client.on_changed()

    def on_message(self, message: Message) -> None:
        """Passes a message of the replica to the stream or to the client that it is for."""
        match message:
            case (Kind.DELTAS, tuple(items)):
                for number, packed in items:
                    if (stream := self._streams.get(number)) is not None:
                        stream.feed(packed)
            case (Kind.ACCEPTED, int(number)):
                if (stream := self._streams.get(number)) is not None:
                    stream.accepted = True
            case (Kind.LOAD, tuple(values)):
                self._client.load = to_load(values)
            case (Kind.PREFIXES, bytes(added), bytes(removed)):
                self._client.on_prefixes(split(added), split(removed))
            case (Kind.ERROR, int(number), str(kind), str(text), param):
                if (stream := self._streams.pop(number, None)) is not None:
                    stream.fail(from_words(kind, text, param))
            case (Kind.STATUS, str(word)):
                self._client.status = ReplicaStatus(word)
                self._client.on_changed()
            case _:
                raise FrameError("a message of no known kind")

    def on_lost(self) -> None:
        """Fails all streams of this connection with StreamLostError."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(StreamLostError("the connection to the replica is lost"))
        self.gone.set()
        self._client.on_disconnected(self)

    def join(self, stream: ReplicaStream) -> int:
        """Adds a stream to the connection. Returns its number, which is new on this connection."""
        number = next(self._numbers)
        self._streams[number] = stream
        return number

    def part(self, number: int, ended: bool) -> None:
        """Removes a stream, and has the replica abort it unless it has `ended`. Does nothing for an unknown number."""
        if self._streams.pop(number, None) is not None and not ended:
            self.send((Kind.ABORT, number))


class ReplicaStream:
    """The deltas of some requests: an async iterator, to be used once and then closed.

    The iterator ends normally only after every choice has had its last delta. Otherwise it raises StreamLostError,
    ReplicaFaultError or an error of the engine. A reader that is slower than the replica gets all deltas that arrived
    in the meantime as one list, with one delta per choice.
    """

    def __init__(
        self,
        client: ChannelClient,
        link: ClientLink,
        requests: tuple[GenerateRequest, ...],
        streamed: bool,
        new_tokens: int | None,
    ) -> None:
        self._client = client
        self._link = link
        self._request_ids = [request.request_id for request in requests]
        self._open_choices = sum(request.sampling.n for request in requests)
        self._tokens = sum(len(r.prompt) for r in requests) if new_tokens is None else new_tokens
        self._packed: list[tuple[tuple[object, ...], ...]] = []
        self._untold = 0  # messages that were used since the server was last told
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self.accepted = False  # the replica has the requests: if it is lost now, they may be why
        self.started = False  # something has come
        self._number = link.join(self)
        client.on_stream_opened(self._tokens)
        try:
            link.send((Kind.OPEN, self._number, streamed, requests))
        except FrameError as error:
            self.fail(error)

    @property
    def weights(self) -> str:
        """Names the weights that the answer is made with."""
        return self._client.weights

    @property
    def num_buffered(self) -> int:
        """How many messages have arrived that the reader has not taken."""
        return len(self._packed)

    async def begin(self) -> None:
        """Waits until deltas have arrived. Raises the same errors as the iterator."""
        while not self._packed:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def __aiter__(self) -> ReplicaStream:
        return self

    async def __anext__(self) -> list[TokenDelta]:
        if not self._packed and self._open_choices <= 0:
            raise StopAsyncIteration
        await self.begin()
        packed, self._packed = self._packed, []
        deltas = unpack_deltas([values for message in packed for values in message], self._request_ids)
        if len(packed) > 1:
            deltas = merged(deltas)
        for delta in deltas:
            if delta.finish_reason is not None:
                self._open_choices -= 1
                self._client.on_answer(delta.num_completion_tokens)
        self._used(len(packed))
        return deltas

    def close(self) -> None:
        """Aborts the requests that still run. It is no coroutine, so that no cancellation can interrupt it."""
        if self._closed:
            return
        self._closed = True
        self._link.part(self._number, ended=self._open_choices <= 0)
        if not self.started:
            self._client.on_stream_begun(self._tokens)
        self._client.on_stream_closed()

    def feed(self, packed: tuple[tuple[object, ...], ...]) -> None:
        """Adds the deltas of one message."""
        self._packed.append(packed)
        if not self.started:
            self.started = True
            self._client.on_stream_begun(self._tokens)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Has the iterator raise `error` after the deltas that have arrived already."""
        self._error = error
        self._wake()

    def _used(self, messages: int) -> None:
        self._untold += messages
        if self._untold >= WINDOW // 2:
            self._link.send((Kind.TAKEN, self._number, self._untold))
            self._untold = 0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

"""The proxy's end: the gateways it has leases on, and requests on their way to one of them."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import deque
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Scope

from deployments.channel import frames
from deployments.channel.frames import FrameError
from deployments.channel.proven import CallingLink
from deployments.ray_serve.asgi_keys import HOLDER, LEASE, SEND_TIMEOUT
from deployments.relay.messages import LEASE_S, SCHEMA, SCOPE, Lease, Word

_PATH = re.compile(r"(.*)/v1/(?:chat/)?completions")
_ASKED = "/health/live"  # what a lease is asked by: any path of the gateway's would do
_IDLE_S = 30.0  # without requests for so long, leases are not renewed
_CONNECT_S = 2.0
_MOST_STREAMS = 5000  # on one connection; Serve has bounds of its own, and lets the rest wait
_REFUSED_S = 5.0  # for which a path is left alone that gives no lease
_TIMEOUT_HEADER = b"x-request-timeout-seconds"  # Serve's own; it keeps that promise itself

_Message = MutableMapping[str, Any]


class RelayClient:
    """`app`: Serve's proxy, by which leases are asked. Lives on the event loop it is used from."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._proxy = _innermost(app)
        # http_options.request_timeout_s: Serve is to end every request after a time of its own.
        self._able = getattr(self._proxy, "request_timeout_s", None) is None
        self._holder = uuid.uuid4().hex
        self._links: dict[tuple[str, str, int], _ClientLink] = {}  # by root path, host and port
        self._askers: dict[str, asyncio.Task[None]] = {}  # by root path
        self._used_s: dict[str, float] = {}

    def open(self, scope: Scope, body: bytes) -> RelayStream | None:
        """The answer of a gateway that there is a lease on; None: the request has to go through Serve."""
        match = _PATH.fullmatch(scope["path"]) if self._able else None
        if match is None or any(name == _TIMEOUT_HEADER for name, _ in scope["headers"]) or not self._routed(scope):
            return None
        root = match[1]
        now_s = time.monotonic()
        self._used_s[root] = now_s
        links = [link for (path, *_), link in self._links.items() if path == root and link.usable(now_s)]
        if root not in self._askers:
            self._askers[root] = asyncio.create_task(self._keep_leases(root, dict(scope)))
        if not links:
            return None
        return RelayStream(min(links, key=lambda link: link.num_streams), {**scope, "root_path": root}, body)

    def _routed(self, scope: Scope) -> bool:
        """False as soon as Serve has taken the application out: a lease would last a little longer."""
        router = getattr(self._proxy, "proxy_router", None)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return router is None or router.match_route(path) is not None

    async def _keep_leases(self, root: str, scope: Scope) -> None:
        """While requests come. One who gives none is not asked again for a while."""
        asking: set[asyncio.Task[None]] = set()
        try:
            while time.monotonic() - self._used_s[root] < _IDLE_S:
                told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
                task = asyncio.create_task(self._ask(root, scope, told))
                asking.add(task)
                task.add_done_callback(asking.discard)
                if not (gateways := await told):
                    await asyncio.sleep(_REFUSED_S)
                    return
                await asyncio.sleep(LEASE_S / 2 / gateways)
        finally:
            del self._askers[root]

    async def _ask(self, root: str, scope: Scope, told: asyncio.Future[int]) -> None:
        """For a lease, until that is over. `told`: how many gateways there are; 0: there is no lease to be had."""
        asked_s = time.monotonic()

        def hear(gateways: int) -> None:
            if not told.done():
                told.set_result(gateways)

        async def send(message: _Message) -> None:
            if message["type"] == "http.response.start":
                lease = message.get(LEASE)
                if isinstance(lease, Lease) and lease.root_path == root:
                    await self._extend(lease, asked_s)
                    hear(lease.gateways)
                else:
                    hear(0)

        path = root + _ASKED
        headers = [(name, value) for name, value in scope["headers"] if name == b"host"]
        headers.append((b"x-request-id", uuid.uuid4().hex.encode()))
        ask = {
            **scope,
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            HOLDER: self._holder,
        }
        try:
            await self._app(ask, _never, send)
        finally:
            hear(0)

    async def _extend(self, lease: Lease, asked_s: float) -> None:
        key = (lease.root_path, lease.host, lease.port)
        link = self._links.get(key)
        if link is None:
            link = await self._connect(key, lease.secret)
        if link is not None:
            link.until_s = asked_s + LEASE_S

    async def _connect(self, key: tuple[str, str, int], secret: bytes) -> _ClientLink | None:
        _, host, port = key
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, link = await loop.create_connection(lambda: _ClientLink(secret, self._holder), host, port)
        except OSError:  # TimeoutError is one
            return None
        if (other := self._links.get(key)) is not None:  # two at once
            link.drop("not needed")
            return other
        self._links[key] = link
        link.gone.add_done_callback(lambda _: self._links.pop(key, None))
        return link


class _ClientLink(CallingLink):
    """The connection to one gateway."""

    def __init__(self, secret: bytes, holder: str) -> None:
        super().__init__(secret, SCHEMA)
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self.until_s = 0.0
        self._holder = holder
        self._streams: dict[int, RelayStream] = {}
        self._number = 0

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def usable(self, now_s: float) -> bool:
        return self.ready and now_s < self.until_s and self.num_streams < _MOST_STREAMS

    def welcomed(self) -> None:
        self.send((Word.HOLDER, self._holder))

    def told(self, message: frames.Message) -> None:
        match message:
            case (Word.BODY, int(number), bytes(data), bool(more)):
                if (stream := self._streams.get(number)) is not None:
                    stream.feed({"type": "http.response.body", "body": data, "more_body": more}, last=not more)
            case (Word.HEAD, int(number), int(status), tuple(headers), timeout_s):
                if (stream := self._streams.get(number)) is not None:
                    start = {"type": "http.response.start", "status": status, "headers": headers}
                    stream.feed({**start, SEND_TIMEOUT: timeout_s}, last=False)
            case (Word.BROKEN, int(number)):
                if (stream := self._streams.pop(number, None)) is not None:
                    stream.stop()
            case _:
                raise FrameError("a message of no known kind")

    def lost(self) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.stop()
        self.gone.set_result(None)

    def join(self, stream: RelayStream) -> int:
        self._number += 1
        self._streams[self._number] = stream
        return self._number

    def part(self, number: int, ended: bool) -> None:
        if self._streams.pop(number, None) is not None and not ended:
            self.send((Word.CANCEL, number))


class RelayStream:
    """The messages of one answer: an async iterator, to be used once and then closed. It ends with the last message, or
    early when the gateway is lost or stop() is called."""

    def __init__(self, link: _ClientLink, scope: Scope, body: bytes) -> None:
        self._link = link
        self._messages: deque[_Message] = deque()
        self._ended = False  # the last message has come
        self._stopped = False
        self._waiter: asyncio.Future[None] | None = None
        self._number = link.join(self)
        link.send((Word.ASK, self._number, tuple(scope.get(name) for name in SCOPE), body))

    def __aiter__(self) -> RelayStream:
        return self

    async def __anext__(self) -> _Message:
        while not self._messages:
            if self._ended or self._stopped:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._messages.popleft()

    def feed(self, message: _Message, last: bool) -> None:
        """Pieces that come faster than they are taken become one."""
        self._ended = last
        before = self._messages[-1] if self._messages else None
        if before is not None and "body" in before and "body" in message:
            before["body"] += message["body"]
            before["more_body"] = message["more_body"]
        else:
            self._messages.append(message)
        self._wake()

    def stop(self) -> None:
        """Nothing more comes, or is wanted."""
        self._stopped = True
        self._wake()

    def close(self) -> None:
        """Cancels the request if it still runs."""
        self._link.part(self._number, self._ended)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _innermost(app: Any) -> Any:
    """Serve's proxy itself, without what Serve and others have put around it."""
    while (inner := getattr(app, "_app", None)) is not None:
        app = inner
    return app


async def _never() -> _Message:
    """receive(): there is no body, and a lease is given back by not renewing it."""
    await asyncio.Event().wait()
    raise AssertionError

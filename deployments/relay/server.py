"""The gateway's end: gives leases, and serves the app to whoever has one."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.channel import frames
from deployments.channel.frames import FrameError
from deployments.channel.proven import ListeningLink
from deployments.ray_serve.asgi_keys import BODY, CANCELS, HOLDER, LEASE, SEND_TIMEOUT
from deployments.relay.messages import LEASE_S, SCHEMA, SCOPE, Lease, Word

log = logging.getLogger("ray.serve")


class RelayServer:
    """An ASGI middleware. `host`: this machine's address in the cluster. `gateways`: how many there are."""

    def __init__(self, app: ASGIApp, host: str, gateways: int) -> None:
        self.app = app
        self.secret = secrets.token_bytes(32)
        self._host = host
        self._gateways = gateways
        self._listening: asyncio.Task[asyncio.Server] | None = None
        self._links: set[_ServerLink] = set()
        self._holders: dict[str, _Holder] = {}  # of every proxy there ever was: there are few

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (holder := scope.get(HOLDER)) is not None:
            await self._lease(str(holder), scope, send)
            return
        try:
            await self.app(scope, receive, send)
        finally:
            if scope["type"] == "lifespan":
                await self.close()

    async def close(self) -> None:
        """At once; what still runs is cancelled."""
        if self._listening is not None:
            (await self._listening).close()
        for link in list(self._links):
            link.drop("closing")

    def joined(self, link: _ServerLink) -> None:
        self._links.add(link)

    def parted(self, link: _ServerLink) -> None:
        self._links.discard(link)

    def holder(self, name: str) -> _Holder:
        return self._holders.setdefault(name, _Holder())

    async def _lease(self, name: str, scope: Scope, send: Send) -> None:
        """Answers at once, and ends the answer when the lease is over and all that came under it, or when it has been
        renewed."""
        if self._listening is None:
            # Not in this request's context: what is relayed later is no part of it.
            self._listening = asyncio.get_running_loop().create_task(self._listen(), context=Context())
        server = await asyncio.shield(self._listening)
        port = server.sockets[0].getsockname()[1]
        holder = self.holder(name)
        holder.app = scope.get("app")
        renewed = holder.renew()
        lease = Lease(self._host, port, scope.get("root_path", ""), self._gateways, self.secret)
        await send({"type": "http.response.start", "status": 200, "headers": [], LEASE: lease})
        with suppress(TimeoutError):
            async with asyncio.timeout(LEASE_S):
                await renewed.wait()
        await holder.idle_or(renewed)
        await send({"type": "http.response.body", "body": b""})

    async def _listen(self) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(partial(_ServerLink, self), self._host, 0)


class _Holder:
    """A proxy, and what runs for it."""

    def __init__(self) -> None:
        self.app: Any = None
        self._running = 0
        self._settled = asyncio.Event()  # nothing runs, or there is a newer lease
        self._settled.set()
        self._renewed = asyncio.Event()

    def renew(self) -> asyncio.Event:
        """Ends the lease before. The event that says that this one has been renewed in turn."""
        self._renewed.set()
        self._settled.set()
        self._renewed = asyncio.Event()
        return self._renewed

    def entered(self) -> None:
        self._running += 1

    def left(self) -> None:
        self._running -= 1
        if not self._running:
            self._settled.set()

    async def idle_or(self, renewed: asyncio.Event) -> None:
        while self._running and not renewed.is_set():
            self._settled.clear()
            await self._settled.wait()


class _ServerLink(ListeningLink):
    """One proxy's connection."""

    def __init__(self, server: RelayServer) -> None:
        super().__init__(server.secret, SCHEMA)
        self._server = server
        self._holder: _Holder | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._flowing = asyncio.Event()
        self._flowing.set()

    def told(self, message: frames.Message) -> None:
        match message:
            case (Word.ASK, int(number), tuple(head), bytes(body)) if self._holder and number not in self._tasks:
                self._tasks[number] = self._loop.create_task(self._run(number, self._holder, _scope(head, body)))
            case (Word.CANCEL, int(number)):
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
            case (Word.HOLDER, str(name)) if self._holder is None:
                self._holder = self._server.holder(name)
            case _:
                raise FrameError("a message of no known kind")

    def opened(self) -> None:
        self._server.joined(self)
        super().opened()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._flowing.clear()

    def relieved(self) -> None:
        self._flowing.set()

    def lost(self) -> None:
        self._server.parted(self)
        self._flowing.set()
        for task in self._tasks.values():
            task.cancel()

    async def _run(self, number: int, holder: _Holder, scope: Scope) -> None:
        answer = _Answer(self, number)
        holder.entered()
        if holder.app is not None:
            scope["app"] = holder.app
        try:
            await self._server.app(scope, _never, answer.send)
        except asyncio.CancelledError:
            pass  # the client has left
        except Exception as error:
            log.error("a relayed request failed", exc_info=error)
        finally:
            holder.left()
            self._tasks.pop(number, None)
            if not answer.ended:
                self.send((Word.BROKEN, number))

    async def flowing(self) -> None:
        """While the proxy does not read, answers wait."""
        if self.congested:
            await self._flowing.wait()


class _Answer:
    def __init__(self, link: _ServerLink, number: int) -> None:
        self._link = link
        self._number = number
        self.ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = tuple(message["headers"])
            self._link.send((Word.HEAD, self._number, message["status"], headers, message.get(SEND_TIMEOUT)))
        else:
            more = message.get("more_body", False)
            self.ended = not more
            self._link.send((Word.BODY, self._number, message.get("body", b""), more))
        await self._link.flowing()


def _scope(head: tuple[Any, ...], body: bytes) -> Scope:
    scope = dict(zip(SCOPE, head, strict=True))
    scope.update(type="http", asgi={"version": "3.0"}, headers=list(scope["headers"]))
    scope[BODY], scope[CANCELS] = body, True
    return scope


async def _never() -> Message:
    """receive(): the body is in the scope, and the task is cancelled when the client leaves."""
    await asyncio.Event().wait()
    raise AssertionError

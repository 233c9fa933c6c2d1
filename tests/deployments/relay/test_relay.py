"""Requests from the guard in Serve's proxy to a gateway on a connection of their own, around a stand-in for Serve."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from deployments.ray_serve.asgi_keys import BODY, CANCELS, HOLDER, LEASE, SEND_TIMEOUT
from deployments.ray_serve.proxy_guard import ProxyGuard
from deployments.relay import client as client_module
from deployments.relay import server as server_module
from deployments.relay.client import RelayClient
from deployments.relay.messages import Lease
from deployments.relay.server import RelayServer

PATH = "/v1/chat/completions"
EVENTS = [(b"content-type", b"text/event-stream")]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


class Gateway:
    """An ASGI app that notes what it is asked. `wait`: between the two pieces of an answer, if set."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []
        self.wait: asyncio.Event | None = None
        self.cancelled = 0
        self.fails = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(dict(scope))
        if self.fails:
            raise ValueError("on purpose")
        await send({"type": "http.response.start", "status": 200, "headers": list(EVENTS), SEND_TIMEOUT: 30.0})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        try:
            if self.wait is not None:
                await self.wait.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        await send({"type": "http.response.body", "body": b"data: 2\n\n"})

    @property
    def relayed(self) -> list[dict[str, Any]]:
        return [scope for scope in self.scopes if CANCELS in scope]


class Client:
    """What one client gets; `leave` is its disconnect."""

    def __init__(self, body: bytes = b"{}") -> None:
        self.messages: list[dict[str, Any]] = []
        self.leave = asyncio.Event()
        self._body: bytes | None = body

    async def receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body}
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def ended(self) -> bool:
        return len(self.messages) > 1 and not self.messages[-1].get("more_body", False)


class House:
    """A guard, Serve behind it, a gateway behind that. `leases`: whether Serve still gives any."""

    def __init__(self, gateways: int = 1) -> None:
        self.gateway = Gateway()
        self.server = RelayServer(self.gateway, "127.0.0.1", gateways)
        self.asked: list[asyncio.Task[Any]] = []  # leases
        self.leases = True
        self.guard = ProxyGuard(self._serve)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        if HOLDER in scope:
            task = asyncio.current_task()
            assert task is not None
            self.asked.append(task)
            if not self.leases:
                await send({"type": "http.response.start", "status": 503, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
        await self.server(scope, receive, send)

    @property
    def links(self) -> list[Any]:
        return list(self.guard._relay._links.values())

    async def ask(self, client: Client, path: str = PATH, headers: Any = (), root: str = "") -> None:
        length = (b"content-length", b"2")
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": root,
            "scheme": "http",
            "http_version": "1.1",
            "client": ("10.0.0.9", 1),
            "headers": [(b"host", b"x"), length, (b"x-request-id", b"mine"), *headers],
        }
        await self.guard(scope, client.receive, client.send)

    async def answer(self, **how: Any) -> Client:
        client = Client()
        await self.ask(client, **how)
        return client

    async def relaying(self) -> None:
        """After this, requests are relayed."""
        await self.answer()
        await until(lambda: any(link.ready for link in self.links))


@pytest_asyncio.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    yield house
    await house.server.close()


async def test_after_the_first_request_the_others_go_straight_to_the_gateway(house: House) -> None:
    first = await house.answer()
    assert not house.gateway.relayed
    await until(lambda: any(link.ready for link in house.links))
    second = await house.answer()
    [seen] = house.gateway.relayed
    assert (first.status, first.body) == (second.status, second.body) == (200, b"data: 1\n\ndata: 2\n\n")
    assert dict(second.messages[0]["headers"])[b"x-request-id"] == b"mine"
    through_serve = house.gateway.scopes[0]
    same = ("type", "method", "path", "raw_path", "query_string", "scheme", "http_version", "client", "headers", BODY)
    assert {key: seen[key] for key in same} == {key: through_serve[key] for key in same}
    assert SEND_TIMEOUT not in second.messages[0]


async def test_what_is_not_relayed(house: House) -> None:
    await house.relaying()
    await house.answer(path="/v1/models")
    await house.answer(headers=[(b"x-request-timeout-seconds", b"5")])
    await house.ask(Client(), headers=[(b"transfer-encoding", b"chunked")])
    assert not house.gateway.relayed
    await house.answer(path="/v1/completions")
    assert len(house.gateway.relayed) == 1


async def test_a_proxy_with_a_time_limit_of_its_own_relays_nothing() -> None:
    class Timed:
        request_timeout_s = 5.0

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError

    class Around:
        def __init__(self) -> None:
            self._app = Timed()

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError

    assert RelayClient(Around()).open({"path": PATH, "headers": []}, b"{}") is None


async def test_an_application_that_serve_takes_out_gets_nothing_more(house: House) -> None:
    class Proxy:
        routed = True
        proxy_router: Any

        def __init__(self) -> None:
            self.proxy_router = self

        def match_route(self, path: str) -> Any:
            assert path == PATH
            return ("/", None, False) if self.routed else None

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await house._serve(scope, receive, send)

    proxy = Proxy()
    house.guard = ProxyGuard(proxy)
    await house.relaying()
    await house.answer()
    assert len(house.gateway.relayed) == 1
    proxy.routed = False
    await house.answer()
    assert len(house.gateway.relayed) == 1


async def test_a_client_that_leaves_cancels_its_request(house: House) -> None:
    await house.relaying()
    house.gateway.wait = asyncio.Event()
    client = Client()
    asking = asyncio.create_task(house.ask(client))
    await until(lambda: len(client.messages) == 2)
    client.leave.set()
    await asking
    await until(lambda: house.gateway.cancelled)
    assert not client.ended and not any(link.num_streams for link in house.links)


async def test_a_gateway_that_is_lost_ends_the_stream_with_an_error_event(house: House) -> None:
    await house.relaying()
    house.gateway.wait = asyncio.Event()
    client = Client()
    asking = asyncio.create_task(house.ask(client))
    await until(lambda: len(client.messages) == 2)
    house.links[0].drop("on purpose")
    await asking
    assert client.ended
    assert json.loads(client.body.split(b"data: ")[-1])["error"]["type"] == "server_error"
    await until(lambda: house.gateway.cancelled)
    assert not house.links


async def test_a_gateway_that_fails_before_it_answers(house: House) -> None:
    await house.relaying()
    house.gateway.fails = True
    client = await house.answer()
    assert client.status == 503 and json.loads(client.body)["error"]["type"] == "server_error"


async def test_a_lease_lasts_as_long_as_what_came_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that Serve, for which it is a request, waits for both before it ends gateway or proxy."""
    monkeypatch.setattr(server_module, "LEASE_S", 0.02)
    house = House(gateways=50)  # so that it is asked often
    await house.relaying()
    house.gateway.wait = asyncio.Event()
    client = Client()
    asking = asyncio.create_task(house.ask(client))
    await until(lambda: len(client.messages) == 2)
    await until(lambda: len(house.asked) > 2)
    house.leases = False
    asked = len(house.asked)
    await until(lambda: len(house.asked) > asked and house.asked[-1].done())  # it got none
    await until(lambda: sum(not task.done() for task in house.asked) == 1)
    holding = [task for task in house.asked if not task.done()]
    house.gateway.wait.set()
    await asking
    await holding[0]
    assert client.ended
    await house.server.close()


async def test_without_a_new_lease_requests_go_through_serve_again(house: House) -> None:
    await house.relaying()
    house.leases = False
    await until(lambda: not any(link.usable(time.monotonic()) for link in house.links))
    before = len(house.gateway.scopes)
    client = await house.answer()
    assert client.ended and not house.gateway.relayed and len(house.gateway.scopes) == before + 1


async def test_below_a_route_prefix(house: House) -> None:

    async def serve(scope: Any, receive: Any, send: Any) -> None:  # as Serve's proxy does
        await house._serve({**scope, "root_path": "/llm"}, receive, send)

    house.guard = ProxyGuard(serve)
    await house.answer(path="/llm" + PATH)
    await until(lambda: any(link.ready for link in house.links))
    await house.answer(path="/llm" + PATH)
    await house.answer(path="/other" + PATH)
    [seen] = house.gateway.relayed
    assert (seen["path"], seen["root_path"]) == ("/llm" + PATH, "/llm")


async def test_an_application_that_knows_no_leases_is_asked_once(house: House) -> None:
    asked = 0

    async def other(scope: Any, receive: Any, send: Any) -> None:
        nonlocal asked
        asked += HOLDER in scope
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hi"})

    house.guard = ProxyGuard(other)
    assert (await house.answer()).body == b"hi"
    await until(lambda: asked)
    for _ in range(5):
        assert (await house.answer()).body == b"hi"
        await asyncio.sleep(0)
    assert asked == 1


async def test_nobody_without_the_secret_is_listened_to() -> None:
    gateway = Gateway()
    server = RelayServer(gateway, "127.0.0.1", gateways=1)
    leased: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        if LEASE in message:
            leased.set_result(message[LEASE])

    holding = asyncio.create_task(server({"type": "http", HOLDER: "p"}, server_module._never, send))
    lease = await leased
    assert "secret" not in repr(lease)
    loop = asyncio.get_running_loop()
    _, link = await loop.create_connection(lambda: client_module._ClientLink(b"x" * 32, "p"), lease.host, lease.port)
    await link.gone
    assert not link.ready and not gateway.scopes
    await holding
    await server.close()

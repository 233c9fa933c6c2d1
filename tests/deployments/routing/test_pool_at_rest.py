"""The gateway's backend over a pool that may be without replicas, and what clients and operators see of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers_gateway import MODEL, FakeBackend, admin_client, client, demo_model, demo_text, error_of
from helpers_routing import Results
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.channel.replica_info import Address, Load, ReplicaInfo, ReplicaStatus, UnavailableReason
from deployments.config.application import ModelConfig
from deployments.config.autoscaling import ScalingConfig
from deployments.config.routing import RoutingConfig, compiled
from deployments.routing import cold_start
from deployments.routing import pool as pool_module
from deployments.routing import serve_backend as backend_module
from deployments.routing.errors import ModelUnavailableError
from deployments.routing.serve_backend import GraphHandles, ServeBackend
from deployments.routing.served_model import ServedModel
from engine.config import EngineConfig


@dataclass
class Replica:
    """The connection to one."""

    address: Address
    usable: bool = True
    connected: bool = True
    status: ReplicaStatus = ReplicaStatus.ACTIVE
    load: Load = field(default_factory=Load)

    def retire(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Serve:
    """Pool and router by their handles. A call is what wakes the pool, if it `wakes`."""

    replicas: int = 0
    wakes: bool = True
    calls: int = 0
    trouble: str | None = None
    connections: list[Replica] = field(default_factory=list)
    usable: int = 0

    def broadcast(self, method: str) -> Results:
        return Results(self.answers)

    async def answers(self) -> list[ReplicaInfo]:
        if not self.replicas:
            raise DeploymentUnavailableError(DeploymentID("pool", "app"))
        return [ReplicaInfo(512, "fp", Address("r1", "127.0.0.1", 1, b""), (), 9.0)]

    @property
    def state(self) -> Serve:
        return self

    def remote(self) -> Any:
        self.calls += 1
        self.replicas += self.wakes
        return _Call(None if self.wakes else asyncio.Event().wait())


class Router:
    @property
    def table(self) -> Router:
        return self

    def remote(self, known: str) -> Any:
        return _Call(_value(compiled(RoutingConfig(), ("a",), (), {"default": 0})))


class _Call:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def cancel(self) -> None:
        if self._answer is not None:
            self._answer.close()

    def __await__(self) -> Any:
        return (self._answer or _value(None)).__await__()


async def _value(value: Any) -> Any:
    return value


@asynccontextmanager
async def backend(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ServeBackend]:
    def connect(address: Address, *_: object) -> Replica:
        serve.connections.append(Replica(address))
        return serve.connections[-1]

    async def trouble() -> str | None:
        return serve.trouble

    def on_usable(pool: str, replicas: int) -> None:
        serve.usable = replicas

    monkeypatch.setattr(pool_module, "ChannelClient", connect)
    monkeypatch.setattr(cold_start, "_CALL_S", 0.01)
    monkeypatch.setattr(backend_module, "serve_trouble", lambda handle: trouble)
    config = ModelConfig(name="a", replicas=0, autoscaling=ScalingConfig(min_replicas=0), engine=EngineConfig("none"))
    tasks = asyncio.all_tasks()
    router: Any = Router()
    pool: Any = serve
    models = {"a": ServedModel("a", 0, "tests", 0, demo_text())}
    handles = GraphHandles(router, {"a": pool}, pool)
    made = ServeBackend(models, (config,), (), handles, on_usable=on_usable, poll_s=0.002)
    try:
        await made.acquaint(60)
        yield made
    finally:
        await made.close()
        await until(lambda: asyncio.all_tasks() <= tasks)  # a task that waited for a replica ends a moment later


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_it_is_listed_and_ready_while_it_rests_and_woken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Serve()
    async with backend(serve, monkeypatch) as b:
        assert list(b.models()) == ["a"] and b.models()["a"].max_model_len == 0
        assert await b.ready() and b.unavailable_reason("a") is UnavailableReason.ASLEEP and not serve.calls
        await asyncio.gather(*(b.awaken("a") for _ in range(4)))
        assert serve.calls == 1 and b.models()["a"].max_model_len == 512 and await b.ready()
        with pytest.raises(ModelUnavailableError):
            await b.awaken("a")  # it is up: that is not what it lacks
        serve.replicas = 0
        await until(lambda: not serve.usable)
        assert await b.ready() and b.unavailable_reason("a") is UnavailableReason.ASLEEP
        assert b.models()["a"].max_model_len == 512  # which is known now


async def test_one_that_fails_to_start_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Serve(wakes=False)
    async with backend(serve, monkeypatch) as b:
        task = asyncio.create_task(b.awaken("a"))
        await until(lambda: b.unavailable_reason("a") is UnavailableReason.STARTING)
        assert await b.ready()
        task.cancel()
        serve.trouble = "no room"
        await until(lambda: b.unavailable_reason("a") is UnavailableReason.FAILING)
        assert not await b.ready()


async def test_one_taken_out_of_rotation_is_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Serve(replicas=1)
    async with backend(serve, monkeypatch) as b:
        await until(lambda: serve.usable == 1)
        [connection] = serve.connections
        connection.usable, connection.status = False, ReplicaStatus.DRAINED
        assert not await b.ready()
        with pytest.raises(ModelUnavailableError):
            await b.awaken("a")
        assert not serve.calls


async def test_a_model_of_unknown_length_is_woken_before_its_request_is_read() -> None:
    unknown = ServedModel(MODEL, 0, "tests", 0, demo_text())
    backend = FakeBackend(served={MODEL: unknown}, asleep=demo_model())
    body = {"model": MODEL, "prompt": "Count:", "max_tokens": 3}
    async with client(backend) as http:
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert backend.awakened == [MODEL]
        error_of(await http.post("/v1/completions", json={**body, "model": "none"}), 404)
    async with client(FakeBackend(served={MODEL: unknown})) as http:
        error_of(await http.post("/v1/completions", json=body), 503)


async def test_the_admin_api_says_why_a_pool_has_no_replica() -> None:
    backend = FakeBackend(replicas={MODEL: []})
    async with admin_client(backend) as http:
        [pool] = (await http.get("/admin/v1/pools")).json()["data"]
        assert (pool["status"], pool["replicas"]) == ("asleep", [])
        assert (await http.post("/admin/v1/drain", json={"pool": MODEL})).json()["status"] == "asleep"
    async with admin_client(FakeBackend()) as http:
        assert (await http.get("/admin/v1/pools")).json()["data"][0]["status"] == "up"
        assert (await http.post("/admin/v1/drain", json={"pool": MODEL})).json()["status"] == "drained"

"""A gateway that has no pool of its own: its models are served by upstreams."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers_gateway import FakeBackend, demo_text
from helpers_upstream import StandIn

from deployments.config.gateway import GatewayConfig
from deployments.config.routing import RoutingConfig, compiled
from deployments.config.routing_table import RoutingTable
from deployments.config.upstream import UpstreamConfig
from deployments.gateway.app import create_app
from deployments.routing.errors import UnableError
from deployments.routing.hints import RoutingHints
from deployments.routing.serve_backend import GraphHandles, ServeBackend
from deployments.routing.served_model import ServedModel
from engine.errors import ContextLengthError
from engine.types import GenerateRequest, SamplingParams

pytestmark = pytest.mark.sockets

CONFIG = UpstreamConfig(name="far", base_url="http://far/v1", tokenizer="here", max_model_len=100)


class Router:
    """Its handle."""

    class Call:
        def __await__(self) -> Any:
            yield from asyncio.sleep(0).__await__()
            return Router.answer()

        def cancel(self) -> None:
            pass

    @staticmethod
    def answer() -> RoutingTable:
        return compiled(RoutingConfig(), (), ("far",), {"default": 0}, ("far",))

    @property
    def table(self) -> Router:
        return self

    def remote(self, known: str) -> Call:
        return Router.Call()


async def test_upstreams_alone_are_ready_and_serve() -> None:
    stand_in = StandIn()
    async with stand_in.listening() as url:
        await ready_and_serving(stand_in, CONFIG.model_copy(update={"base_url": url}))


async def ready_and_serving(stand_in: StandIn, config: UpstreamConfig) -> None:
    served = {"far": ServedModel("far", 0, "far", 100, demo_text())}
    tasks = asyncio.all_tasks()
    backend = ServeBackend(served, (), (config,), GraphHandles(Router(), {}, None))  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(60):
            while not await backend.ready():
                await asyncio.sleep(0.001)
        assert [(m.id, m.max_model_len, m.owned_by) for m in backend.models().values()] == [("far", 100, "far")]

        async def ask(num_tokens: int, **fields: Any) -> str:
            request = GenerateRequest("r", (1, 2, 3), SamplingParams(max_tokens=num_tokens))
            hints = RoutingHints("/chat/completions", {"model": "far", "messages": [], **fields})
            stream = backend.generate("far", (request,), True, hints)
            return "".join([delta.text async for deltas in stream for delta in deltas])

        assert await ask(20) == "one two"
        [(_, _, sent)] = stand_in.asked
        assert (sent["model"], sent["max_tokens"], sent["stream"]) == ("far", 20, True)
        with pytest.raises(ContextLengthError):
            await ask(98)
        with pytest.raises(UnableError, match="No pool of the model"):
            await ask(20, logprobs=True)
    finally:
        await backend.close()
        assert asyncio.all_tasks() - tasks == set()
    await stand_in.left()


async def test_the_backend_is_closed_when_its_app_ends() -> None:
    backend = FakeBackend()
    app = create_app(GatewayConfig(), backend)
    async with app.router.lifespan_context(app):
        assert not backend.shut_down
    assert backend.shut_down

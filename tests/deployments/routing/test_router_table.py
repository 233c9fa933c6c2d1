"""The router's table, changed while it runs, and how a gateway follows it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest

from deployments.config.routing_table import RoutingTable
from deployments.routing import table_feed
from deployments.routing.router import ModelRouter

POOLS, TIERS = ("fast", "long"), {"default": 0}


def router() -> ModelRouter:
    return ModelRouter(POOLS, (), TIERS)


async def test_a_new_configuration_takes_effect_without_a_restart() -> None:
    r = router()
    first = await r.table("")
    assert first is not None and set(first.routes) == {"fast", "long"}
    assert await r.table(first.revision) is None
    r.reconfigure({"routes": {"m": {"pools": {"fast": 95, "long": 5}}}})
    second = await r.table(first.revision)
    assert second is not None and set(second.routes) == {"m"}
    r.reconfigure({})
    assert (await r.table("")) == first


async def test_a_bad_configuration_changes_nothing() -> None:
    r = router()
    for bad in ({"routes": {"m": {"pools": ["nope"]}}}, {"route": {}}, {"routes": {"m": {"pools": []}}}):
        with pytest.raises(ValueError):
            r.reconfigure(bad)
    table = await r.table("")
    assert table is not None and set(table.routes) == {"fast", "long"}


class Call:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def cancel(self) -> None:
        pass

    def __await__(self) -> Generator[Any, None, Any]:
        yield from asyncio.sleep(0).__await__()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Handle:
    """ModelRouter's handle: `faults` are raised first."""

    def __init__(self, made: ModelRouter, faults: list[BaseException]) -> None:
        self._made = made
        self._faults = faults
        self.asked: list[str] = []

    @property
    def table(self) -> Handle:
        return self

    def remote(self, known: str) -> Call:
        self.asked.append(known)
        if self._faults:
            return Call(self._faults.pop(0))
        return Call(None if known == self._made._table.revision else self._made._table)


async def test_a_gateway_follows() -> None:
    r, got = router(), list[RoutingTable]()
    handle = Handle(r, [TimeoutError()])
    task = asyncio.create_task(table_feed.follow(handle, got.append, poll_s=0.0))  # type: ignore[arg-type]

    async def until(count: int) -> None:
        async with asyncio.timeout(60):
            while len(got) < count:
                await asyncio.sleep(0)

    await until(1)
    r.reconfigure({"routes": {"m": {"pools": ["fast"]}}})
    await until(2)
    assert [set(table.routes) for table in got] == [{"fast", "long"}, {"long", "m"}]
    seen = len(handle.asked)
    while len(handle.asked) < seen + 3:
        await asyncio.sleep(0)
    assert len(got) == 2  # asked again, and nothing has changed
    task.cancel()

"""The gateway in this process, with a key database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from helpers_gateway import FakeBackend

from deployments.accounts.database import Database
from deployments.config.gateway import USUAL_SCOPES, GatewayConfig, KeysConfig, LedgerConfig, StaticKey
from deployments.gateway.app import create_app

ROOT_KEY = "sk-tests-root-0123456789"
SCOPES = (*USUAL_SCOPES, "admin")
WAIT_S = 60.0  # generous: a busy machine must not fail a test


def keyed(directory: Path, **changes: Any) -> GatewayConfig:
    """Gateways of the same directory share a database, which is there. ROOT_KEY may do everything."""
    database = Database(str(directory / "keys.db"))
    database.migrate()
    database.close()
    return GatewayConfig(
        api_keys=(StaticKey(key=ROOT_KEY, org="root", scopes=SCOPES),),
        keys=KeysConfig(database=str(directory / "keys.db"), poll_s=0.05),
        ledger=LedgerConfig(flush_s=0.05, spill_dir=str(directory / "spill")),
        **changes,
    )


@asynccontextmanager
async def gateway(config: GatewayConfig, backend: FakeBackend | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that runs as long as the context; its key is ROOT_KEY unless a request says otherwise."""
    app = create_app(config, backend or FakeBackend())
    headers = bearer(ROOT_KEY)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as http:
            yield http


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def soon(condition: Callable[[], Any]) -> Any:
    """The first true value of an asynchronous condition."""
    deadline = time.monotonic() + WAIT_S
    while not (value := await condition()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return value

"""What a gateway has when there is a key database: keys, the ledger, budgets, and the stores the admin API works on."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from deployments.accounts.budget import Budgets
from deployments.accounts.database import Database
from deployments.accounts.directory import Directory
from deployments.accounts.errors import BudgetExhaustedError
from deployments.accounts.key_cache import KeyCache
from deployments.accounts.key_store import KeyStore
from deployments.accounts.ledger_spill import SpillFile
from deployments.accounts.ledger_store import LedgerStore
from deployments.accounts.ledger_writer import LedgerWriter
from deployments.accounts.records import DatabaseDownError
from deployments.accounts.tenant import Tenant
from deployments.accounts.usage_entry import UsageEntry
from deployments.config.gateway import GatewayConfig
from deployments.observe.request_log import CLIENT_GONE, RequestLog

_STATE_DIR = "~/.local/state/sluicegate"


class Accounts:
    """Made with the app and started by its lifespan. While the database is down, the gateway starts and runs without
    it: see KeyCache, LedgerWriter and Budgets for what then becomes of keys, usage and budgets."""

    def __init__(self, config: GatewayConfig, clock: Callable[[], float] = time.time) -> None:
        """Raises ValueError when the database's setting is unusable."""
        assert config.keys.database is not None
        self._clock = clock
        self._database = Database(config.keys.database)
        self.keys = KeyStore(self._database, clock)
        self.directory = Directory(self._database, clock)
        self.usage = LedgerStore(self._database)
        keys = config.keys
        self.key_cache = KeyCache(self.keys, keys.fresh_s, keys.poll_s, keys.grace_s, self._database.migrate, clock)
        self._budgets = Budgets(self.directory, clock)
        self._run = uuid.uuid4().hex
        self._numbers = itertools.count()
        directory = config.ledger.spill_dir or f"{_STATE_DIR}/{_short(str(self._database))}"
        spill = SpillFile(Path(directory).expanduser(), self._run)
        self._writer = LedgerWriter(self._run, self.usage, spill, self._budgets, config.ledger.flush_s)

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:
        """Takes the ledger to a safe place at the end."""
        with suppress(DatabaseDownError):
            await self.key_cache.refresh()
        watch = asyncio.create_task(self.key_cache.watch())
        self._writer.start()
        try:
            yield
        finally:
            watch.cancel()
            self.key_cache.close()
            await asyncio.to_thread(self._writer.close)
            self._database.close()

    def check_budget(self, tenant: Tenant) -> None:
        """Raises BudgetExhaustedError when the tenant's project has used up its month."""
        exhausted = self._budgets.check(tenant.org, tenant.project)
        if exhausted is None:
            return
        opens = datetime.fromtimestamp(self._clock() + exhausted.opens_in_s, UTC)
        message = (
            "You exceeded your current quota, please check your plan and billing details. The project "
            f"{tenant.project} of {tenant.org} has used {exhausted.used} of its {exhausted.limit} tokens per month; "
            f"the next month begins on {opens:%Y-%m-%d}, UTC."
        )
        raise BudgetExhaustedError(message, exhausted.opens_in_s)

    def finished(self, record: RequestLog) -> None:
        """Charges a request that has run, however it ended. Refused ones cost nothing and are not kept: a client
        could fill the database with them."""
        if record.tenant is None or record.model is None or record.prompt_tokens == 0:
            return
        if 400 <= record.status < 500 and record.status != CLIENT_GONE:
            return
        failed = record.error is not None and not record.completion_tokens  # our fault, and the client got nothing
        entry = UsageEntry(
            uid=f"{self._run}-{next(self._numbers)}",
            at=self._clock(),
            org=record.org or "",
            project=record.project or "",
            key_id=record.tenant,
            model=record.model,
            path=record.path,
            request_id=record.request_id,
            status=record.status,
            prompt_tokens=0 if failed else record.prompt_tokens,
            cached_tokens=0 if failed else record.cached_tokens,
            completion_tokens=0 if failed else record.completion_tokens,
            ttft_s=record.ttft_s,
            total_s=record.total_s,
        )
        self._writer.add(entry)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]

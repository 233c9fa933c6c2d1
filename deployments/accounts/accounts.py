"""What a gateway has when there is a key database: keys, the ledger, budgets, and the stores the admin API works on."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from deployments.accounts.budget import Budgets, ExhaustedBudget
from deployments.accounts.database import Database
from deployments.accounts.directory import Directory
from deployments.accounts.errors import BudgetExhaustedError, BudgetHeldError
from deployments.accounts.key_cache import KeyCache
from deployments.accounts.key_store import KeyStore
from deployments.accounts.ledger_spill import SpillFile
from deployments.accounts.ledger_store import LedgerStore
from deployments.accounts.ledger_writer import LedgerWriter
from deployments.accounts.records import DatabaseDownError
from deployments.accounts.running_file import RunningFile
from deployments.accounts.tables import USAGE
from deployments.accounts.tenant import Tenant
from deployments.accounts.threads import StoreThreads
from deployments.accounts.usage_entry import UsageEntry
from deployments.config.gateway import GatewayConfig
from deployments.observe.request_log import CLIENT_GONE, RequestLog, RequestTrace

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
        prepare = partial(self._database.migrate, create=False)
        self.key_cache = KeyCache(self.keys, keys.fresh_s, keys.poll_s, keys.grace_s, prepare, clock)
        self.threads = StoreThreads()
        self._budgets = Budgets(self.directory, clock)
        self._run = uuid.uuid4().hex
        self._running: dict[int, RequestTrace] = {}
        directory = config.ledger.spill_dir or f"{_STATE_DIR}/{_short(str(self._database))}"
        place = Path(directory).expanduser()
        self._writer = LedgerWriter(
            self._run,
            self.usage,
            SpillFile(place, self._run),
            self._budgets,
            config.ledger.flush_s,
            self._so_far,
            RunningFile(place, self._run),
        )

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
            self.threads.close()
            await asyncio.to_thread(self._writer.close)
            self._database.close()

    def check_budget(self, tenant: Tenant) -> None:
        """Raises BudgetExhaustedError when the tenant's project has used up its month, BudgetHeldError when requests
        that run may do so."""
        exhausted = self._budgets.check(tenant.org, tenant.project)
        if exhausted is not None:
            raise self._quota(tenant.org, tenant.project, exhausted)

    def began(self, trace: RequestTrace, tokens: int) -> None:
        """Keeps `tokens` of the project's budget, all that the request may use, until finished(). Raises what
        check_budget() does when there is less left."""
        org, project = trace.org or "", trace.project or ""
        exhausted = self._budgets.hold(trace.number, org, project, tokens)
        if exhausted is not None:
            raise self._quota(org, project, exhausted, tokens)
        self._running[trace.number] = trace

    def finished(self, record: RequestLog) -> None:
        """Charges a request that has run, however it ended. What costs nothing, refused or failed, is not kept: clients
        could fill the database with it."""
        self._running.pop(record.number, None)
        if (entry := self._entry(record)) is not None:
            self._writer.add(entry)
        self._budgets.release(record.number)

    def _so_far(self) -> list[UsageEntry]:
        """What would be charged if every request ended now. On the ledger's thread."""
        now_s = time.perf_counter()
        records = [trace.record(now_s) for trace in list(self._running.values())]
        entries = [self._entry(record) for record in records if record.completion_tokens]
        return [entry for entry in entries if entry is not None]

    def _entry(self, record: RequestLog) -> UsageEntry | None:
        if record.tenant is None or record.model is None or record.prompt_tokens == 0:
            return None
        if 400 <= record.status < 500 and record.status != CLIENT_GONE:
            return None
        if record.error is not None and not record.completion_tokens:  # our fault, and the client got nothing
            return None
        return UsageEntry(
            uid=f"{self._run}-{record.number}",
            at=self._clock(),
            org=record.org or "",
            project=record.project or "",
            key_id=_clip(record.tenant, USAGE.c.key_id),
            model=_clip(record.model, USAGE.c.model),
            path=_clip(record.path, USAGE.c.path),
            request_id=_clip(record.request_id, USAGE.c.request_id),
            status=record.status,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            completion_tokens=record.completion_tokens,
            ttft_s=record.ttft_s,
            total_s=record.total_s,
        )

    def _quota(
        self, org: str, project: str, exhausted: ExhaustedBudget, tokens: int = 1
    ) -> BudgetExhaustedError | BudgetHeldError:
        left = exhausted.limit - exhausted.used
        if tokens <= left:
            return BudgetHeldError(
                f"The project {project} of {org} has {left} tokens left this month, of which {exhausted.held} are held "
                f"for requests that run; this request may use up to {tokens}. Try again when they have ended, or ask "
                "for fewer with max_tokens."
            )
        opens = datetime.fromtimestamp(self._clock() + exhausted.opens_in_s, UTC)
        parts = [
            "You exceeded your current quota, please check your plan and billing details. The project "
            f"{project} of {org} has used {exhausted.used} of its {exhausted.limit} tokens per month"
        ]
        if left > 0:
            parts.append(f"; this request may use up to {tokens}, and {left} are left: ask for fewer with max_tokens")
        parts.append(f"; the next month begins on {opens:%Y-%m-%d}, UTC.")
        return BudgetExhaustedError("".join(parts), exhausted.opens_in_s)


def _clip(text: str, column: sa.Column[Any]) -> str:
    """As much of it as the column takes."""
    most: int = column.type.length  # type: ignore[attr-defined]
    return text[:most]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]

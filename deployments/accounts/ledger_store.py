"""The ledger in the database. Synchronous; all raise DatabaseDownError."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from deployments.accounts.database import Database
from deployments.accounts.periods import day_of, month_of
from deployments.accounts.tables import SPENT, STATE, USAGE
from deployments.accounts.usage_entry import UsageEntry

GROUPS = {"day": USAGE.c.day, "org": USAGE.c.org, "project": USAGE.c.project, "key": USAGE.c.key_id}
GROUPS |= {"model": USAGE.c.model}
_SUMMED = ("prompt_tokens", "cached_tokens", "completion_tokens")


class LedgerStore:
    """The ledger of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, entries: Sequence[UsageEntry]) -> None:
        """All of them or none; those that are there already are passed over. A few hundred at a time."""
        by_uid = {entry.uid: entry for entry in entries}
        with self._database.write() as c:
            # Two gateways that replay the same file must not both find an entry missing: this makes them take turns.
            c.execute(STATE.update().values(pepper=STATE.c.pepper))
            known = set(c.execute(sa.select(USAGE.c.uid).where(USAGE.c.uid.in_(list(by_uid)))).scalars())
            new = [entry for uid, entry in by_uid.items() if uid not in known]
            if not new:
                return
            c.execute(USAGE.insert(), [asdict(entry) | {"day": day_of(entry.at)} for entry in new])
            spent: Counter[tuple[str, str, str]] = Counter()
            for entry in new:
                spent[entry.org, entry.project, month_of(entry.at)] += entry.tokens
            for (org, project, month), tokens in spent.items():
                same = sa.and_(SPENT.c.org == org, SPENT.c.project == project, SPENT.c.month == month)
                if not c.execute(SPENT.update().where(same).values(tokens=SPENT.c.tokens + tokens)).rowcount:
                    c.execute(SPENT.insert().values(org=org, project=project, month=month, tokens=tokens))

    def prune(self, before: float) -> int:
        """Forgets requests that ended before that time, seconds since 1970, and returns how many. What projects have
        spent in a month stays."""
        with self._database.write() as c:
            old = sa.and_(USAGE.c.at < before, USAGE.c.day <= day_of(before))
            return int(c.execute(USAGE.delete().where(old)).rowcount)

    def usage(
        self, by: Sequence[str], since: float | None = None, until: float | None = None, org: str | None = None
    ) -> list[dict[str, Any]]:
        """Sums per combination of `by`, which are keys of GROUPS, in that order. `since` is included, `until` is not;
        seconds since 1970."""
        columns = [GROUPS[name].label(name) for name in by]
        sums = [sa.func.coalesce(sa.func.sum(USAGE.c[name]), 0).label(name) for name in _SUMMED]
        query = sa.select(*columns, sa.func.count().label("requests"), *sums).group_by(*columns).order_by(*columns)
        # The day has an index, and a range of days holds the range of times.
        if since is not None:
            query = query.where(USAGE.c.at >= since, USAGE.c.day >= day_of(since))
        if until is not None:
            query = query.where(USAGE.c.at < until, USAGE.c.day <= day_of(until))
        if org is not None:
            query = query.where(USAGE.c.org == org)
        with self._database.read() as c:
            rows = [dict(row) for row in c.execute(query).mappings()]
        for row in rows:
            row |= {name: int(row[name]) for name in _SUMMED}  # Postgres sums integers as decimals
            row["total_tokens"] = row["prompt_tokens"] + row["completion_tokens"]
        return rows

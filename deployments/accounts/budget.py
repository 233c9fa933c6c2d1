"""Budgets: how many tokens a project may use in a calendar month."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from deployments.accounts.directory import Directory
from deployments.accounts.periods import month_end
from deployments.accounts.usage_entry import UsageEntry


@dataclass(frozen=True, slots=True)
class ExhaustedBudget:
    """A budget that is used up. `limit` and `used` in tokens; `opens_in_s`: seconds until the next month begins."""

    limit: int
    used: int
    opens_in_s: float


_Project = tuple[str, str]  # organisation, project


@dataclass(frozen=True, slots=True)
class _View:
    """The database at one moment: per project its budget and what is spent, and how much of that came from here."""

    projects: dict[_Project, tuple[int, int]]
    stored: Counter[_Project]


class Budgets:
    """What a gateway knows of all budgets: the database as of the ledger's last flush, and its own requests since.

    A request is charged when it ends. A project can therefore go over its budget by what its running requests still
    use, and, over several gateways, by what ended elsewhere within the ledger's flush interval. Once that shows,
    nothing more is let in.
    """

    def __init__(self, directory: Directory, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._clock = clock
        self._charged: Counter[_Project] = Counter()  # written by the gateway's event loop only
        self._stored: Counter[_Project] = Counter()  # written by the ledger's thread only
        self._view = _View({}, Counter())

    def check(self, org: str, project: str) -> ExhaustedBudget | None:
        """None while the project may spend. It costs microseconds."""
        known = self._view.projects.get((org, project))
        if known is None:
            return None
        limit, spent = known
        used = spent + self._charged[org, project] - self._view.stored[org, project]
        if used < limit:
            return None
        now = self._clock()
        return ExhaustedBudget(limit, used, month_end(now) - now)

    def charge(self, entry: UsageEntry) -> None:
        """An entry of this gateway counts from now on."""
        self._charged[entry.org, entry.project] += entry.tokens

    def stored(self, entry: UsageEntry) -> None:
        """An entry that was charged here is in the database now."""
        self._stored[entry.org, entry.project] += entry.tokens

    def refresh(self) -> None:
        """Reads the database, on the thread that calls stored(). Raises DatabaseDownError."""
        projects = {(p.org, p.id): (p.monthly_tokens or 0, p.spent_tokens) for p in self._directory.budgets()}
        self._view = _View(projects, self._stored.copy())

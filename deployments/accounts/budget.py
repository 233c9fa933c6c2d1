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
    """A budget that has not enough left. `limit`, `used` and `held`, for requests that run, in tokens; `opens_in_s`:
    seconds until the next month begins."""

    limit: int
    used: int
    held: int
    opens_in_s: float


_Project = tuple[str, str]  # organisation, project


@dataclass(frozen=True, slots=True)
class _View:
    """The database at one moment: per project its budget and what is spent, and how much of that came from here."""

    projects: dict[_Project, tuple[int, int]]
    stored: Counter[_Project]


class Budgets:
    """What a gateway knows of all budgets: the database as of the ledger's last flush, and its own requests since.

    A request holds what it may use at most until it ends, and is charged what it used then. On one gateway a project
    therefore never goes over its budget. With several, what their requests hold is not known to each other: a project
    may go over by what the others have admitted at the same time, and what ended there within the ledger's flush
    interval. Once that shows, nothing more is let in.
    """

    def __init__(self, directory: Directory, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._clock = clock
        self._held: dict[int, tuple[_Project, int]] = {}  # by request
        self._holding: Counter[_Project] = Counter()
        self._charged: Counter[_Project] = Counter()  # written by the gateway's event loop only
        self._stored: Counter[_Project] = Counter()  # written by the ledger's thread only
        self._view = _View({}, Counter())

    def check(self, org: str, project: str, tokens: int = 1) -> ExhaustedBudget | None:
        """None while the project may spend so many tokens more. It costs microseconds."""
        known = self._view.projects.get((org, project))
        if known is None:
            return None
        limit, spent = known
        used = spent + self._charged[org, project] - self._view.stored[org, project]
        held = self._holding[org, project]
        if used + held + tokens <= limit:
            return None
        now = self._clock()
        return ExhaustedBudget(limit, used, held, month_end(now) - now)

    def hold(self, request: int, org: str, project: str, tokens: int) -> ExhaustedBudget | None:
        """Keeps `tokens` of the project's budget for a request, by its number, until release(); or says why not."""
        if (exhausted := self.check(org, project, tokens)) is not None:
            return exhausted
        self._held[request] = ((org, project), tokens)
        self._holding[org, project] += tokens
        return None

    def release(self, request: int) -> None:
        """The request has ended. Does nothing if it held nothing."""
        if (held := self._held.pop(request, None)) is not None:
            project, tokens = held
            self._holding[project] -= tokens
            if not self._holding[project]:
                del self._holding[project]

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

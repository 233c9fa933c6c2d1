"""Organisations, projects with their budgets, and the audit log. Synchronous, as the store of keys is; all raise
DatabaseDownError."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa

from deployments.accounts.database import Database
from deployments.accounts.periods import month_of
from deployments.accounts.records import AccountError, Actor, AuditEntry, Org, Project
from deployments.accounts.tables import AUDIT, ORGS, PROJECTS, SPENT, STATE
from deployments.config.gateway import ACCOUNT_NAME


class Directory:
    """Organisations, projects and the audit log of one database."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def create_org(self, org: str, by: Actor) -> Org:
        """Gives the one there is if it exists already. Raises AccountError for a name that can't be one."""
        now = self._clock()
        with self._database.write() as c:
            next_revision(c)
            if ensure_org(c, org, now):
                audited(c, now, by, "org.create", org, {})
            return Org(*c.execute(sa.select(ORGS.c.id, ORGS.c.created_at).where(ORGS.c.id == org)).one())

    def orgs(self, after: str | None, limit: int) -> list[Org]:
        """In the order of their names. `after`: only those whose names come after this one."""
        query = sa.select(ORGS.c.id, ORGS.c.created_at).order_by(ORGS.c.id).limit(limit)
        if after is not None:
            query = query.where(ORGS.c.id > after)
        with self._database.read() as c:
            return [Org(*row) for row in c.execute(query)]

    def set_project(self, org: str, project: str, monthly_tokens: int | None, hard_stop: bool, by: Actor) -> Project:
        """Creates the project, and its organisation, or changes its budget. Raises AccountError."""
        now = self._clock()
        values = {"monthly_tokens": monthly_tokens, "hard_stop": hard_stop}
        with self._database.write() as c:
            next_revision(c)
            ensure_project(c, org, project, now)
            c.execute(PROJECTS.update().where(PROJECTS.c.org == org, PROJECTS.c.id == project).values(**values))
            audited(c, now, by, "project.set", f"{org}/{project}", values)
            return self._projects(c, PROJECTS.c.org == org, PROJECTS.c.id == project)[0]

    def projects(self, org: str | None = None) -> list[Project]:
        """In the order of organisations and names."""
        with self._database.read() as c:
            return self._projects(c, *([] if org is None else [PROJECTS.c.org == org]))

    def budgets(self) -> list[Project]:
        """The projects that have a budget with a hard stop."""
        with self._database.read() as c:
            return self._projects(c, PROJECTS.c.monthly_tokens.is_not(None), PROJECTS.c.hard_stop)

    def audit(self, before: int | None, limit: int) -> list[AuditEntry]:
        """Newest first, only entries older than the one with id `before`."""
        query = sa.select(AUDIT).order_by(AUDIT.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(AUDIT.c.id < before)
        with self._database.read() as c:
            return [AuditEntry(**row) for row in c.execute(query).mappings()]

    def note(self, by: Actor, action: str, target: str, detail: Mapping[str, Any]) -> None:
        """Something was done that is kept nowhere else: an entry in the audit log."""
        with self._database.write() as c:
            audited(c, self._clock(), by, action, target, detail)

    def _projects(self, c: sa.Connection, *where: sa.ColumnElement[bool]) -> list[Project]:
        month = month_of(self._clock())
        same = sa.and_(SPENT.c.org == PROJECTS.c.org, SPENT.c.project == PROJECTS.c.id, SPENT.c.month == month)
        query = (
            sa.select(PROJECTS, sa.func.coalesce(SPENT.c.tokens, 0).label("spent_tokens"))
            .select_from(sa.outerjoin(PROJECTS, SPENT, same))
            .where(*where)
            .order_by(PROJECTS.c.org, PROJECTS.c.id)
        )
        return [Project(**row) for row in c.execute(query).mappings()]


def next_revision(c: sa.Connection) -> int:
    """Counts a change. Must be a transaction's first statement: it is what makes changes wait for each other."""
    c.execute(STATE.update().values(revision=STATE.c.revision + 1))
    revision: int = c.execute(sa.select(STATE.c.revision)).scalar_one()
    return revision


def ensure_org(c: sa.Connection, org: str, now: float) -> bool:
    """Makes sure that there is one. Returns whether it is new."""
    _check_name(org, "org")
    if c.execute(sa.select(ORGS.c.id).where(ORGS.c.id == org)).first() is not None:
        return False
    c.execute(ORGS.insert().values(id=org, created_at=now))
    return True


def ensure_project(c: sa.Connection, org: str, project: str, now: float) -> None:
    """Makes sure that the project and its organisation exist. Raises AccountError for a name that cannot be one."""
    ensure_org(c, org, now)
    _check_name(project, "project")
    known = sa.select(PROJECTS.c.id).where(PROJECTS.c.org == org, PROJECTS.c.id == project)
    if c.execute(known).first() is None:
        c.execute(PROJECTS.insert().values(org=org, id=project, created_at=now, hard_stop=True))


def audited(c: sa.Connection, now: float, by: Actor, action: str, target: str, detail: Mapping[str, Any]) -> None:
    """Adds an entry to the audit log, in the transaction of the change."""
    target = target[: AUDIT.c.target.type.length]  # type: ignore[attr-defined]  # names of pools may be longer
    entry = {"actor": by.name, "request_id": by.request_id, "action": action, "target": target, "detail": dict(detail)}
    c.execute(AUDIT.insert().values(at=now, **entry))


def _check_name(name: str, param: str) -> None:
    if not re.fullmatch(ACCOUNT_NAME, name):
        raise AccountError(
            f"{param} {name!r} must be 1 to 64 letters, digits, dots, dashes and underscores, and begin with a letter "
            "or digit",
            param,
        )

"""Organisations, projects, keys and the audit log as plain data. No secret is ever part of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

from deployments.config.gateway import USUAL_SCOPES as _USUAL_SCOPES
from deployments.config.gateway import Scope

SCOPES: tuple[str, ...] = get_args(Scope)
USUAL_SCOPES: frozenset[str] = frozenset(_USUAL_SCOPES)  # of a key that is made without saying which


class AccountError(ValueError):
    """A change that can't be made as asked. The message says why; `param` names the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class NotFoundError(AccountError):
    """There is no such key, organisation or project."""


class RevokedError(AccountError):
    """The key is revoked: nothing changes it any more."""


class DatabaseDownError(Exception):
    """The database can't be reached, or did not answer in time."""


class DatabaseRefusedError(Exception):
    """The database does not take what is to be written, however often it is tried."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who makes a change: a key's id, or `cli:` and a user's name. `request_id` when it came by HTTP."""

    name: str
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class NewKey:
    """`models` None: all that the tier allows. `expires_at`: seconds since 1970, None for never."""

    org: str
    project: str = "default"
    tier: str = "default"
    name: str = ""
    scopes: frozenset[str] = USUAL_SCOPES
    models: frozenset[str] | None = None
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """`prefix` is that of the newest secret. Times are seconds since 1970."""

    id: str
    prefix: str
    name: str
    org: str
    project: str
    tier: str
    scopes: frozenset[str]
    models: frozenset[str] | None
    created_at: float
    expires_at: float | None
    disabled: bool
    revoked_at: float | None

    def status(self, now: float) -> str:
        """`active`, `disabled`, `expired` or `revoked`."""
        if self.revoked_at is not None:
            return "revoked"
        if self.expires_at is not None and self.expires_at <= now:
            return "expired"
        return "disabled" if self.disabled else "active"

    def public(self, now: float) -> dict[str, Any]:
        """What lists and the API show."""
        return {
            "id": self.id,
            "object": "key",
            "prefix": f"sk-sg-{self.prefix}",
            "name": self.name,
            "org": self.org,
            "project": self.project,
            "tier": self.tier,
            "scopes": sorted(self.scopes),
            "models": None if self.models is None else sorted(self.models),
            "status": self.status(now),
            "created_at": int(self.created_at),
            "expires_at": _seconds(self.expires_at),
            "revoked_at": _seconds(self.revoked_at),
        }


@dataclass(frozen=True, slots=True)
class Org:
    """An organisation. `created_at`: seconds since 1970."""

    id: str
    created_at: float

    def public(self) -> dict[str, Any]:
        """What lists and the API show."""
        return {"id": self.id, "object": "org", "created_at": int(self.created_at)}


@dataclass(frozen=True, slots=True)
class Project:
    """`monthly_tokens`: the budget, prompt and completion tokens together, per calendar month in UTC; None for no
    limit. `hard_stop` False: the budget is only reported. `spent_tokens`: this month's."""

    org: str
    id: str
    created_at: float
    monthly_tokens: int | None
    hard_stop: bool
    spent_tokens: int

    def public(self) -> dict[str, Any]:
        """What lists and the API show."""
        return {
            "id": self.id,
            "object": "project",
            "org": self.org,
            "monthly_tokens": self.monthly_tokens,
            "hard_stop": self.hard_stop,
            "spent_tokens": self.spent_tokens,
            "created_at": int(self.created_at),
        }


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change, and who made it. `at`: seconds since 1970."""

    id: int
    at: float
    actor: str
    action: str
    target: str
    request_id: str | None
    detail: dict[str, Any] = field(default_factory=dict)

    def public(self) -> dict[str, Any]:
        """What lists and the API show."""
        return {
            "id": self.id,
            "object": "audit_entry",
            "at": round(self.at, 3),
            "actor": self.actor,
            "action": self.action,
            "target": self.target,
            "request_id": self.request_id,
            "detail": self.detail,
        }


def _seconds(at: float | None) -> int | None:
    return None if at is None else int(at)

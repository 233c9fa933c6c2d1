"""Keys in the database: making, finding, changing, revoking. Synchronous; every method is one transaction, and every
change is in the audit log. All raise DatabaseDownError.

A change first counts up `state.revision`. That takes the row's lock, so changes come one after the other, and whoever
polls the number sees them in the order in which they became visible.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from deployments.accounts.database import Database
from deployments.accounts.directory import audited, ensure_project, next_revision
from deployments.accounts.records import SCOPES, AccountError, Actor, Key, NewKey, NotFoundError, RevokedError
from deployments.accounts.secret import digest, matches, new_salt, new_secret, prefix_of
from deployments.accounts.tables import KEYS, SECRETS, STATE

_CHANGEABLE = frozenset({"name", "tier", "scopes", "models", "expires_at", "disabled"})


@dataclass(frozen=True, slots=True)
class FoundKey:
    """The key a secret belongs to, as it was at `revision`. `until`: when this secret stops being one of the key's,
    after a rotation."""

    key: Key
    until: float | None
    revision: int


@dataclass(frozen=True, slots=True)
class ChangedKeys:
    """The keys that were changed, the prefixes of their secrets, and the revision up to which that is known."""

    revision: int
    key_ids: frozenset[str]
    prefixes: frozenset[str] = frozenset()


class KeyStore:
    """The keys of one database."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def create(self, new: NewKey, by: Actor) -> tuple[Key, str]:
        """The key and its secret, which can't be had again. The organisation and the project come into being with
        their first key. Raises AccountError."""
        _check_scopes(new.scopes)
        now = self._clock()
        if new.expires_at is not None and new.expires_at <= now:
            raise AccountError("expires_at must be in the future", "expires_at")
        key_id = f"key_{secrets.token_hex(12)}"
        with self._database.write() as c:
            revision = next_revision(c)
            ensure_project(c, new.org, new.project, now)
            row = {
                "id": key_id,
                "prefix": "",
                "name": new.name,
                "org": new.org,
                "project": new.project,
                "tier": new.tier,
                "scopes": sorted(new.scopes),
                "models": None if new.models is None else sorted(new.models),
                "created_at": now,
                "expires_at": new.expires_at,
                "disabled": False,
                "revoked_at": None,
                "revision": revision,
            }
            c.execute(KEYS.insert().values(row))
            secret = _add_secret(c, key_id)
            key = _key(c, key_id)
            audited(c, now, by, "key.create", key_id, {k: v for k, v in key.public(now).items() if k != "object"})
        return key, secret

    def get(self, key_id: str) -> Key:
        """Raises NotFoundError."""
        with self._database.read() as c:
            return _key(c, key_id)

    def list(self, org: str | None = None, after: str | None = None, limit: int | None = None) -> list[Key]:
        """Oldest first; only those made after the key `after`. Raises NotFoundError for an unknown `after`."""
        query = sa.select(KEYS).order_by(KEYS.c.seq).limit(limit)
        if org is not None:
            query = query.where(KEYS.c.org == org)
        with self._database.read() as c:
            if after is not None:
                seq = c.execute(sa.select(KEYS.c.seq).where(KEYS.c.id == after)).scalar()
                if seq is None:
                    raise NotFoundError(f"there is no key {after!r}", "after")
                query = query.where(KEYS.c.seq > seq)
            return [_from_row(row) for row in c.execute(query).mappings()]

    def update(self, key_id: str, changes: Mapping[str, Any], by: Actor) -> Key:
        """`changes`: any of name, tier, scopes, models, expires_at, disabled. Raises NotFoundError; AccountError for
        a revoked key."""
        assert changes.keys() <= _CHANGEABLE
        if "scopes" in changes:
            _check_scopes(changes["scopes"])
        values = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in changes.items()}
        with self._database.write() as c:
            revision = next_revision(c)
            _alive(_key(c, key_id))
            c.execute(KEYS.update().where(KEYS.c.id == key_id).values(**values, revision=revision))
            audited(c, self._clock(), by, "key.update", key_id, values)
            return _key(c, key_id)

    def revoke(self, key_id: str, by: Actor) -> Key:
        """For good. Revoking twice changes nothing. Raises NotFoundError."""
        now = self._clock()
        with self._database.write() as c:
            revision = next_revision(c)
            key = _key(c, key_id)
            if key.revoked_at is not None:
                return key
            c.execute(KEYS.update().where(KEYS.c.id == key_id).values(revoked_at=now, revision=revision))
            audited(c, now, by, "key.revoke", key_id, {})
            return _key(c, key_id)

    def rotate(self, key_id: str, grace_s: float, by: Actor) -> tuple[Key, str]:
        """A new secret for the same key. Older ones work for `grace_s` seconds more, or shorter if an earlier rotation
        said so. Raises NotFoundError, and AccountError for a revoked key."""
        now = self._clock()
        with self._database.write() as c:
            revision = next_revision(c)
            _alive(_key(c, key_id))
            c.execute(KEYS.update().where(KEYS.c.id == key_id).values(revision=revision))
            c.execute(SECRETS.delete().where(SECRETS.c.key_id == key_id, SECRETS.c.expires_at <= now))
            later = sa.or_(SECRETS.c.expires_at.is_(None), SECRETS.c.expires_at > now + grace_s)
            c.execute(SECRETS.update().where(SECRETS.c.key_id == key_id, later).values(expires_at=now + grace_s))
            secret = _add_secret(c, key_id)
            audited(c, now, by, "key.rotate", key_id, {"grace_s": grace_s})
            return _key(c, key_id), secret

    def find(self, secret: str) -> FoundKey | None:
        """The key whose secret this is, also when the key is revoked, disabled or expired: its owner may be told."""
        prefix = prefix_of(secret)
        if prefix is None:
            return None
        joined = sa.join(SECRETS, KEYS, SECRETS.c.key_id == KEYS.c.id)
        columns = [*KEYS.c, SECRETS.c.salt, SECRETS.c.digest, SECRETS.c.expires_at.label("until")]
        with self._database.read() as c:
            state = c.execute(sa.select(STATE.c.revision, STATE.c.pepper)).one()  # first: the key is no older than it
            row = (
                c.execute(sa.select(*columns).select_from(joined).where(SECRETS.c.prefix == prefix)).mappings().first()
            )
        if row is None or not matches(secret, row["salt"], state.pepper, row["digest"]):
            return None
        return FoundKey(_from_row(row), row["until"], state.revision)

    def changes(self, since: int | None) -> ChangedKeys:
        """Which keys were changed after revision `since`, all of them with None. While nothing changes, one row is
        read."""
        with self._database.read() as c:
            revision = c.execute(sa.select(STATE.c.revision)).scalar_one()
            if revision == since:
                return ChangedKeys(revision, frozenset())
            both = sa.select(KEYS.c.id, SECRETS.c.prefix).join(SECRETS, SECRETS.c.key_id == KEYS.c.id)
            rows = c.execute(both if since is None else both.where(KEYS.c.revision > since)).all()
            return ChangedKeys(revision, frozenset(row.id for row in rows), frozenset(row.prefix for row in rows))


def _add_secret(c: sa.Connection, key_id: str) -> str:
    secret, salt = new_secret(), new_salt()
    prefix = prefix_of(secret)
    assert prefix is not None
    pepper = c.execute(sa.select(STATE.c.pepper)).scalar_one()
    c.execute(SECRETS.insert().values(prefix=prefix, key_id=key_id, salt=salt, digest=digest(secret, salt, pepper)))
    c.execute(KEYS.update().where(KEYS.c.id == key_id).values(prefix=prefix))
    return secret


def _key(c: sa.Connection, key_id: str) -> Key:
    row = c.execute(sa.select(KEYS).where(KEYS.c.id == key_id)).mappings().first()
    if row is None:
        raise NotFoundError(f"there is no key {key_id!r}", "key_id")
    return _from_row(row)


def _from_row(row: Mapping[Any, Any]) -> Key:
    return Key(
        id=row["id"],
        prefix=row["prefix"],
        name=row["name"],
        org=row["org"],
        project=row["project"],
        tier=row["tier"],
        scopes=frozenset(row["scopes"]),
        models=None if row["models"] is None else frozenset(row["models"]),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        disabled=row["disabled"],
        revoked_at=row["revoked_at"],
    )


def _alive(key: Key) -> None:
    if key.revoked_at is not None:
        raise RevokedError(f"the key {key.id!r} is revoked, which can't be undone", "key_id")


def _check_scopes(scopes: frozenset[str]) -> None:
    if unknown := sorted(scopes - set(SCOPES)):
        raise AccountError(f"unknown scope {unknown[0]!r}; known: {', '.join(SCOPES)}", "scopes")
    if not scopes:
        raise AccountError(f"at least one scope is needed of {', '.join(SCOPES)}", "scopes")

"""The schema as queries see it. migrations/versions makes it; a test holds the two to each other.

Times are seconds since 1970, lists are JSON, days and months are text in UTC: all of it the same in every database.
"""

from __future__ import annotations

import sqlalchemy as sa

METADATA = sa.MetaData()

# One row. `revision` counts changes; `pepper` goes into every digest.
STATE = sa.Table(
    "state",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("pepper", sa.String(64), nullable=False),
)
ORGS = sa.Table(
    "orgs",
    METADATA,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("created_at", sa.Double, nullable=False),
)
PROJECTS = sa.Table(
    "projects",
    METADATA,
    sa.Column("org", sa.String(64), sa.ForeignKey("orgs.id"), primary_key=True),
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("monthly_tokens", sa.BigInteger),
    sa.Column("hard_stop", sa.Boolean, nullable=False),
)
# `prefix`: of the newest secret. `revision`: the state's when the key was last changed.
KEYS = sa.Table(
    "keys",
    METADATA,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    sa.Column("prefix", sa.String(16), nullable=False),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("org", sa.String(64), nullable=False),
    sa.Column("project", sa.String(64), nullable=False),
    sa.Column("tier", sa.String(64), nullable=False),
    sa.Column("scopes", sa.JSON, nullable=False),
    sa.Column("models", sa.JSON(none_as_null=True)),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double),
    sa.Column("disabled", sa.Boolean, nullable=False),
    sa.Column("revoked_at", sa.Double),
    sa.Column("revision", sa.BigInteger, nullable=False, index=True),
    sa.ForeignKeyConstraint(["org", "project"], ["projects.org", "projects.id"]),
)
# A key has more than one while a rotation's grace time runs.
SECRETS = sa.Table(
    "secrets",
    METADATA,
    sa.Column("prefix", sa.String(16), primary_key=True),
    sa.Column("key_id", sa.String(64), sa.ForeignKey("keys.id"), nullable=False, index=True),
    sa.Column("salt", sa.String(32), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("expires_at", sa.Double),
)
AUDIT = sa.Table(
    "audit",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("actor", sa.String(128), nullable=False),
    sa.Column("action", sa.String(32), nullable=False),
    sa.Column("target", sa.String(160), nullable=False),
    sa.Column("request_id", sa.String(128)),
    sa.Column("detail", sa.JSON, nullable=False),
)
# No foreign keys: static keys and their organisations are in no other table.
USAGE = sa.Table(
    "usage",
    METADATA,
    sa.Column("uid", sa.String(64), primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("day", sa.String(10), nullable=False, index=True),
    sa.Column("org", sa.String(64), nullable=False),
    sa.Column("project", sa.String(64), nullable=False),
    sa.Column("key_id", sa.String(64), nullable=False),
    sa.Column("model", sa.String(200), nullable=False),
    sa.Column("path", sa.String(64), nullable=False),
    sa.Column("request_id", sa.String(128), nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("ttft_s", sa.Double),
    sa.Column("total_s", sa.Double, nullable=False),
)
# Sums of USAGE, written with it in one transaction: what budgets read several times a second.
SPENT = sa.Table(
    "spent",
    METADATA,
    sa.Column("org", sa.String(64), primary_key=True),
    sa.Column("project", sa.String(64), primary_key=True),
    sa.Column("month", sa.String(7), primary_key=True),
    sa.Column("tokens", sa.BigInteger, nullable=False),
)

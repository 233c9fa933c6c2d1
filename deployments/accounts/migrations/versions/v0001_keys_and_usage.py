"""The first schema: organisations, projects, keys with their secrets, the audit log, and what requests used."""

from __future__ import annotations

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates all tables, and the one row of `state`."""
    state = op.create_table(
        "state",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("pepper", sa.String(64), nullable=False),
    )
    op.bulk_insert(state, [{"id": 1, "revision": 0, "pepper": secrets.token_hex(32)}])
    op.create_table(
        "orgs",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_table(
        "projects",
        sa.Column("org", sa.String(64), sa.ForeignKey("orgs.id"), primary_key=True),
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("monthly_tokens", sa.BigInteger),
        sa.Column("hard_stop", sa.Boolean, nullable=False),
    )
    op.create_table(
        "keys",
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
    op.create_table(
        "secrets",
        sa.Column("prefix", sa.String(16), primary_key=True),
        sa.Column("key_id", sa.String(64), sa.ForeignKey("keys.id"), nullable=False, index=True),
        sa.Column("salt", sa.String(32), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("expires_at", sa.Double),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("actor", sa.String(128), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("target", sa.String(160), nullable=False),
        sa.Column("request_id", sa.String(128)),
        sa.Column("detail", sa.JSON, nullable=False),
    )
    op.create_table(
        "usage",
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
    op.create_table(
        "spent",
        sa.Column("org", sa.String(64), primary_key=True),
        sa.Column("project", sa.String(64), primary_key=True),
        sa.Column("month", sa.String(7), primary_key=True),
        sa.Column("tokens", sa.BigInteger, nullable=False),
    )

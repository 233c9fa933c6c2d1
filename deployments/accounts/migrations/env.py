"""Run by alembic: migrates on the connection, and in the transaction, that Database.migrate gives it."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()

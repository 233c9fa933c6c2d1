"""New, empty databases of each kind that keys and the ledger can live in."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from deployments.keys.database import database_url

_VARIABLE = "SLUICE_TEST_POSTGRES"
_SERVER = os.environ.get(_VARIABLE)
KINDS = [
    "sqlite",
    pytest.param("postgres", marks=pytest.mark.skipif(not _SERVER, reason=f"{_VARIABLE} names no Postgres server")),
]
"""Parameters of a fixture. The variable: the URL of a database whose user may create others."""


@contextmanager
def new_database(kind: str, directory: Path) -> Iterator[str]:
    """What Database takes for it. A Postgres one is dropped at the end."""
    if kind == "sqlite":
        yield str(directory / "keys.db")
        return
    assert _SERVER is not None
    url = database_url(_SERVER)
    server = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    name = f"sluice_test_{uuid.uuid4().hex}"
    try:
        with server.connect() as connection:
            connection.execute(sa.text(f"create database {name}"))
        yield url.set(database=name).render_as_string(hide_password=False)
        with server.connect() as connection:
            connection.execute(sa.text(f"drop database {name} with (force)"))
    finally:
        server.dispose()

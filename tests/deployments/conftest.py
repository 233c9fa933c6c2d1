"""Servers that tests of several packages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers_database import postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a Postgres server, for as long as the tests run."""
    with postgres_server() as url:
        yield url

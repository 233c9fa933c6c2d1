"""New, empty databases of each kind that keys and the ledger can live in."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pwd import getpwall

import pytest
import sqlalchemy as sa

from deployments.accounts.database import database_url
from load_tests.processes import end_with_parent

KINDS = ["sqlite", "postgres"]
"""Parameters of a fixture."""


@contextmanager
def new_database(request: pytest.FixtureRequest, directory: Path) -> Iterator[str]:
    """What Database takes for one of the kind `request.param`. A Postgres one is dropped at the end."""
    if request.param == "sqlite":
        yield str(directory / "keys.db")
        return
    url = database_url(request.getfixturevalue("postgres"))
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


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a Postgres of our own, on a socket in a new directory, whose user may create databases."""
    places = ":".join([os.environ["PATH"], *map(str, Path("/usr/lib/postgresql").glob("*/bin"))])
    initdb, postgres = (shutil.which(name, path=places) for name in ("initdb", "postgres"))
    if initdb is None or postgres is None:
        pytest.skip("these tests need a Postgres server's programs: apt-get install postgresql")
    user = _other_user() if os.geteuid() == 0 else None  # Postgres refuses to run as root
    # Not below pytest's own directory, which other users may not enter.
    with tempfile.TemporaryDirectory(prefix="sluice-postgres-") as directory:
        if user is not None:
            shutil.chown(directory, user)
        data = f"{directory}/data"
        command = [initdb, "-D", data, "-U", "sluice", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        subprocess.run(command, user=user, cwd=directory, check=True, stdout=subprocess.DEVNULL)
        command = [postgres, "-D", data, "-k", directory, "-c", "listen_addresses=", "-c", "fsync=off"]
        with Path(directory, "log").open("wb") as log:
            process = subprocess.Popen(
                command, user=user, cwd=directory, stdout=log, stderr=log, preexec_fn=end_with_parent
            )
        try:
            url = f"postgresql://sluice@/postgres?host={directory}"
            _wait_for(url, process, Path(directory, "log"))
            yield url
        finally:
            process.send_signal(signal.SIGINT)  # ends its sessions too
            process.wait()


def _other_user() -> str:
    names = {entry.pw_name for entry in getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    server = sa.create_engine(database_url(url))
    try:
        while True:
            try:
                server.connect().close()
                return
            except sa.exc.OperationalError:
                assert process.poll() is None, log.read_text()
                time.sleep(0.02)
    finally:
        server.dispose()

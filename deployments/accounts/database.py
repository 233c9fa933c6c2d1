"""Connections to the database, and its schema."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from deployments.accounts.records import DatabaseDownError, DatabaseRefusedError
from deployments.accounts.tables import STATE
from deployments.config.environment import from_environment

_BUSY_MS = 5000  # milliseconds that SQLite waits for another process's transaction
_POOL_S = 5.0  # for which a thread waits for one of the pool's connections
_POSTGRES = {  # https://www.postgresql.org/docs/current/libpq-connect.html
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
# Statements, not options at the start of a connection, which poolers refuse.
_BOUNDS = ("SET statement_timeout = '30s'", "SET lock_timeout = '10s'")
_MAKES = "`sluice keys create` makes one"
_MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATION_LOCK = 0x736C7569  # of Postgres: any number that nobody else takes
_ALEMBIC = threading.Lock()  # alembic's commands work on globals, and two databases may be opened at once


class DatabaseUrlError(ValueError):
    """The setting does not name a database. The message has no password in it."""


class NoDatabaseError(DatabaseDownError):
    """There is no database at that place, or an empty one. Gateways make none: one that runs on another machine, or
    with a wrong path, would refuse every key and know no budget."""


class Database:
    """One database, to be shared by threads. Synchronous on purpose: the command line and the ledger's thread need no
    event loop, and the drivers that look asynchronous hand SQLite to a thread as well; the gateway does so itself."""

    def __init__(self, setting: str) -> None:
        """`setting`: a path, an SQLAlchemy URL, or `env:NAME` for either. Nothing is opened yet. Raises
        DatabaseUrlError."""
        self.url = database_url(setting)
        sqlite = self.url.get_backend_name() == "sqlite"
        self._file = Path(self.url.database or "") if sqlite else None
        try:
            if self._file is not None:  # which never makes the file
                place = self.url.set(database=f"file:{quote(str(self._file))}", query={"mode": "rw", "uri": "true"})
                self._engine = sa.create_engine(place)
            else:
                self._engine = sa.create_engine(
                    self.url, pool_pre_ping=True, pool_timeout=_POOL_S, connect_args=_connect_args(self.url)
                )
        except (ModuleNotFoundError, NoSuchModuleError) as error:
            raise DatabaseUrlError(f"{self}: no driver for {self.url.drivername}: {error}") from None
        if self.url.get_backend_name() == "postgresql":
            sa.event.listen(self._engine, "connect", _set_bounds)
        if sqlite:
            sa.event.listen(self._engine, "connect", _set_pragmas)
            sa.event.listen(self._engine, "begin", _begin)

    def __str__(self) -> str:
        return self.url.render_as_string(hide_password=True)

    def migrate(self, create: bool = True) -> None:
        """Brings the schema up to date, and makes it where there is none, unless `create` is false. Cheap when there is
        nothing to do, and safe when several processes start at once: one works, the others wait. Raises
        DatabaseDownError, also when the schema is newer than this release, and NoDatabaseError."""
        with self._migration_lock(create), self.write() as connection:
            if not create and not sa.inspect(connection).has_table(STATE.name):
                raise NoDatabaseError(f"{self} has no tables: {_MAKES}")
            if self.url.get_backend_name() == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            config = Config(attributes={"connection": connection})
            config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
            try:
                with _ALEMBIC:
                    command.upgrade(config, "head")
            except CommandError as error:
                raise DatabaseDownError(f"{self}: its schema is not one this release knows: {error}") from None

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """One transaction that changes nothing. Raises DatabaseDownError and DatabaseRefusedError."""
        with _failures(self), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """One transaction, committed at the end. Raises DatabaseDownError, also when it could not be committed, and
        DatabaseRefusedError."""
        with _failures(self), self._engine.execution_options(writes=True).begin() as connection:
            yield connection

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()

    @contextmanager
    def _migration_lock(self, create: bool) -> Iterator[None]:
        """For SQLite, a file lock: switching a new file to WAL fails at once, without waiting, when another process is
        doing the same."""
        if self._file is None:
            yield
            return
        try:
            if create:
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(os.open(self._file, os.O_CREAT | os.O_RDWR, 0o600))  # digests and names: the owner's only
            elif not self._file.exists():
                raise NoDatabaseError(f"there is no database {self._file}: {_MAKES}")
            lock = os.open(f"{self._file}.lock", os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise DatabaseDownError(f"{self._file}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def database_url(setting: str) -> URL:
    """Raises DatabaseUrlError."""
    try:
        setting = from_environment(setting, "the database's")
    except ValueError as error:
        raise DatabaseUrlError(str(error)) from None
    if "://" in setting:
        try:
            url = make_url(setting)
        except ArgumentError:
            raise DatabaseUrlError("the database's URL is not of the form dialect://user:password@host/name") from None
        if url.drivername in ("postgres", "postgresql"):
            return url.set(drivername="postgresql+psycopg")
        if url.get_backend_name() != "sqlite":
            return url
        setting = url.database or ""
    path = Path(setting).expanduser()
    if not path.is_absolute():
        raise DatabaseUrlError(
            f"the database {setting!r} is a relative path: gateways and commands run in different directories; "
            "write an absolute one, one that begins with ~, or a URL"
        )
    return URL.create("sqlite", database=str(path))


def _connect_args(url: URL) -> dict[str, Any]:
    """For Postgres: bounds for a server that hangs, or whose machine is gone. The URL's own settings come first."""
    if url.get_backend_name() != "postgresql":
        return {}
    return {name: value for name, value in _POSTGRES.items() if name not in url.query}


@contextmanager
def _failures(database: Database) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DatabaseRefusedError(f"{database}: {' '.join(str(error.orig).split())[:200]}") from None
    except (DBAPIError, PoolTimeoutError) as error:
        # Not `from error`: SQLAlchemy's messages quote statements with their parameters.
        reason = getattr(error, "orig", None) or error
        raise DatabaseDownError(f"{database}: {' '.join(str(reason).split())[:200]}") from None


def _set_bounds(connection: Any, _: object) -> None:
    connection.autocommit = True
    with connection.cursor() as cursor:
        for statement in _BOUNDS:
            cursor.execute(statement)
    connection.autocommit = False


def _set_pragmas(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions begin where _begin says, not where Python's driver guesses
    connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
    connection.execute("PRAGMA journal_mode = WAL")  # readers never wait for a writer
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _begin(connection: sa.Connection) -> None:
    """A transaction that will write takes its turn at its start: one that read first could not wait for it."""
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

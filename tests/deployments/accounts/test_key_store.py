"""Keys, organisations, projects and the audit log in a real database."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from helpers_database import KINDS, new_database
from hypothesis import given
from hypothesis import strategies as st

from deployments.accounts import migrations
from deployments.accounts.database import Database, DatabaseUrlError, database_url
from deployments.accounts.directory import Directory
from deployments.accounts.key_store import KeyStore
from deployments.accounts.periods import day_of, duration_s, moment, month_end, month_of
from deployments.accounts.records import AccountError, Actor, DatabaseDownError, NewKey, NotFoundError
from deployments.accounts.secret import digest, new_salt, new_secret, prefix_of
from deployments.accounts.tables import METADATA

ME = Actor("cli:tests")


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=KINDS)
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with new_database(request, tmp_path / "new") as setting:
        yield setting


@pytest.fixture
def database(setting: str) -> Iterator[Database]:
    database = Database(setting)
    database.migrate()
    yield database
    database.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(database: Database, clock: Clock) -> KeyStore:
    return KeyStore(database, clock)


@pytest.fixture
def directory(database: Database, clock: Clock) -> Directory:
    return Directory(database, clock)


# ------------------------------------------------------------------------------------------------ the schema
def test_migrations_make_the_schema_that_queries_use(database: Database) -> None:
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []


def test_the_schema_is_postgres_too() -> None:
    """As far as that can be seen without one: every statement can be written in its dialect."""
    out = io.StringIO()
    history = ScriptDirectory(str(Path(migrations.__file__).parent))
    context = MigrationContext.configure(dialect_name="postgresql", opts={"as_sql": True, "output_buffer": out})
    with Operations.context(context):
        for script in reversed(list(history.walk_revisions())):
            script.module.upgrade()
    for table in METADATA.sorted_tables:
        assert f"CREATE TABLE {table.name} (" in out.getvalue()


def test_many_may_migrate_at_once_and_again(setting: str) -> None:
    databases = [Database(setting) for _ in range(8)]
    barrier = threading.Barrier(len(databases))

    def go(database: Database) -> str:
        barrier.wait()
        database.migrate()
        with database.read() as c:
            return str(c.execute(sa.text("select pepper from state")).scalar_one())

    with ThreadPoolExecutor(len(databases)) as pool:
        assert len(set(pool.map(go, databases))) == 1
    if databases[0].url.get_backend_name() == "sqlite":
        assert Path(setting).stat().st_mode & 0o077 == 0
    for database in databases:
        database.close()


def test_a_newer_schema_is_refused(database: Database) -> None:
    with database.write() as c:
        c.execute(sa.text("update alembic_version set version_num = '9999'"))
    with pytest.raises(DatabaseDownError, match="not one this release knows"):
        database.migrate()


def test_settings_that_name_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_TEST_DB", "/x/y.db")
    monkeypatch.delenv("SLUICE_TEST_UNSET", raising=False)
    for setting in ("/x/y.db", "sqlite:////x/y.db", "env:SLUICE_TEST_DB"):
        assert str(database_url(setting)) == "sqlite:////x/y.db"
    assert database_url("~/k.db").database == str(Path.home() / "k.db")
    assert database_url("postgres://u:p@h/db").drivername == "postgresql+psycopg"
    bad = [("x.db", "relative"), ("sqlite:///x.db", "relative"), ("env:SLUICE_TEST_UNSET", "SLUICE_TEST_UNSET")]
    for setting, reason in [*bad, ("://", "dialect")]:
        with pytest.raises(DatabaseUrlError, match=reason):
            database_url(setting)
    with pytest.raises(DatabaseUrlError, match="no driver for nosuch") as refused:
        Database("nosuch://user:hunter2@host/db")
    assert "hunter2" not in str(refused.value)


def test_a_database_that_cannot_be_opened_is_down(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseDownError):
        Database(str(tmp_path / "file/keys.db")).migrate()
    (tmp_path / "junk.db").write_bytes(b"no database" * 100)
    with pytest.raises(DatabaseDownError):
        Database(str(tmp_path / "junk.db")).migrate()


# ------------------------------------------------------------------------------------------------ secrets
def test_secrets_and_their_prefixes() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len({prefix_of(secret) for secret in secrets}) == 100
    for wrong in ("", "sk-sg-", "sk-demo", next(iter(secrets)) + "x", next(iter(secrets))[:-1], "x" + new_secret()):
        assert prefix_of(wrong) is None


@given(st.text(max_size=80))
def test_any_text_has_a_prefix_or_not(text: str) -> None:
    assert prefix_of(text) is None


def test_the_digest_depends_on_everything() -> None:
    secret, salt, pepper = new_secret(), new_salt(), "ab" * 32
    mine = digest(secret, salt, pepper)
    others = [digest(new_secret(), salt, pepper), digest(secret, new_salt(), pepper), digest(secret, salt, "cd" * 32)]
    assert len({mine, *others}) == 4 and mine == digest(secret, salt, pepper)


# ------------------------------------------------------------------------------------------------ keys
def test_a_key_is_found_by_its_secret_only(store: KeyStore) -> None:
    new = NewKey("acme", "web", "pro", "ci", frozenset({"inference"}), frozenset({"m1", "m2"}), 1_900_000_000.0)
    key, secret = store.create(new, ME)
    store.create(NewKey("acme"), ME)
    found = store.find(secret)
    assert found is not None and found.key == key == store.get(key.id) and found.until is None
    assert (key.org, key.project, key.tier, key.name) == ("acme", "web", "pro", "ci")
    assert (key.scopes, key.models, key.expires_at) == (new.scopes, new.models, new.expires_at)
    last = "a" if secret[-1] != "a" else "b"
    for wrong in (secret[:-1] + last, new_secret(), "sk-demo", ""):
        assert store.find(wrong) is None


def test_nothing_kept_or_shown_has_the_secret(database: Database, store: KeyStore, directory: Directory) -> None:
    key, secret = store.create(NewKey("acme"), ME)
    key, second = store.rotate(key.id, 60.0, ME)
    shown = repr([store.find(secret), key, key.public(0.0), store.list(), directory.audit(None, 100)])
    with database.read() as c:
        for table in METADATA.sorted_tables:
            shown += repr(c.execute(sa.select(table)).all())
    for part in (secret, second, secret.rpartition("-")[2], second.rpartition("-")[2]):
        assert part not in shown


def test_status_over_time(store: KeyStore, clock: Clock) -> None:
    key, secret = store.create(NewKey("acme", expires_at=clock.now + 10), ME)
    assert [key.status(clock.now + dt) for dt in (9.9, 10.0)] == ["active", "expired"]
    assert store.update(key.id, {"disabled": True}, ME).status(clock.now) == "disabled"
    assert store.update(key.id, {"disabled": False, "expires_at": None}, ME).status(clock.now + 1e9) == "active"
    assert store.revoke(key.id, ME).status(clock.now) == "revoked"
    assert store.revoke(key.id, ME).revoked_at == clock.now
    found = store.find(secret)
    assert found is not None and found.key.status(clock.now) == "revoked"


def test_rotation_with_grace(store: KeyStore, clock: Clock) -> None:
    key, first = store.create(NewKey("acme"), ME)
    rotated, second = store.rotate(key.id, 60.0, ME)
    assert rotated.id == key.id and rotated.prefix == prefix_of(second)
    until = {secret: found.until for secret in (first, second) if (found := store.find(secret))}
    assert until == {first: clock.now + 60.0, second: None}
    _, third = store.rotate(key.id, 3600.0, ME)  # does not lengthen the first one's grace
    until = {secret: found.until for secret in (first, second, third) if (found := store.find(secret))}
    assert until == {first: clock.now + 60.0, second: clock.now + 3600.0, third: None}
    clock.now += 61.0
    store.rotate(key.id, 0.0, ME)
    assert store.find(first) is None


def test_mistakes_are_named(store: KeyStore, directory: Directory, clock: Clock) -> None:
    key, _ = store.create(NewKey("acme"), ME)
    wrong: list[tuple[Any, str, str]] = [
        (lambda: store.create(NewKey("a b"), ME), "org", "'a b'"),
        (lambda: store.create(NewKey("acme", "x/y"), ME), "project", "'x/y'"),
        (lambda: store.create(NewKey("acme", scopes=frozenset({"all"})), ME), "scopes", "models.read, inference"),
        (lambda: store.create(NewKey("acme", scopes=frozenset()), ME), "scopes", "at least one"),
        (lambda: store.create(NewKey("acme", expires_at=clock.now), ME), "expires_at", "future"),
        (lambda: directory.create_org("", ME), "org", "''"),
    ]
    for act, param, words in wrong:
        with pytest.raises(AccountError, match=words) as refused:
            act()
        assert refused.value.param == param
    for act in (store.get, lambda key_id: store.revoke(key_id, ME), lambda key_id: store.rotate(key_id, 0, ME)):
        with pytest.raises(NotFoundError, match="key_none"):
            act("key_none")
    store.revoke(key.id, ME)
    for again in (lambda: store.rotate(key.id, 0, ME), lambda: store.update(key.id, {"disabled": False}, ME)):
        with pytest.raises(AccountError, match="revoked"):
            again()
    assert len(store.list()) == 1  # what failed has left nothing


def test_pages_and_filters(store: KeyStore) -> None:
    ids = [store.create(NewKey("acme" if i % 2 else "umbrella"), ME)[0].id for i in range(7)]
    assert [key.id for key in store.list()] == ids
    assert [key.id for key in store.list("acme")] == ids[1::2]
    assert [key.id for key in store.list(after=ids[2], limit=3)] == ids[3:6]
    with pytest.raises(NotFoundError):
        store.list(after="key_none")


def test_changes_are_seen_once_in_order(store: KeyStore, directory: Directory) -> None:
    start = store.changes(None)
    assert start.key_ids == frozenset()
    a, b = (store.create(NewKey("acme"), ME)[0].id for _ in range(2))
    seen = store.changes(start.revision)
    assert seen.key_ids == {a, b}
    store.revoke(a, ME)
    then = store.changes(seen.revision)
    assert then.key_ids == {a} and then.revision > seen.revision
    directory.set_project("acme", "web", 10, True, ME)
    last = store.changes(then.revision)
    assert last.key_ids == frozenset() and last.revision > then.revision
    assert store.changes(last.revision) == last


@pytest.mark.slow
def test_fifty_at_once(setting: str, database: Database, clock: Clock) -> None:
    """From several connections, as several processes have: none fails, none is lost, every revision is one change."""
    databases = [Database(setting) for _ in range(5)]

    def life(i: int) -> tuple[str, str]:
        mine = KeyStore(databases[i % 5], clock)
        key, secret = mine.create(NewKey(f"org{i % 3}", f"p{i % 4}"), ME)
        if i % 2:
            mine.revoke(key.id, ME)
        return key.id, secret

    with ThreadPoolExecutor(10) as pool:
        made = list(pool.map(life, range(50)))
    store = KeyStore(database, clock)
    for i, (key_id, secret) in enumerate(made):
        found = store.find(secret)
        assert found is not None and found.key.id == key_id
        assert found.key.status(clock.now) == ("revoked" if i % 2 else "active")
    assert len(store.list()) == 50 and store.changes(None).revision == 75
    for other in databases:
        other.close()


# ------------------------------------------------------------------------------------------------ the directory
def test_organisations_and_projects(store: KeyStore, directory: Directory) -> None:
    store.create(NewKey("zeta"), ME)
    directory.create_org("acme", ME)
    directory.create_org("acme", ME)
    assert [org.id for org in directory.orgs(None, 10)] == ["acme", "zeta"]
    assert [org.id for org in directory.orgs("acme", 10)] == ["zeta"]
    project = directory.set_project("acme", "web", 1000, True, ME)
    assert (project.monthly_tokens, project.hard_stop, project.spent_tokens) == (1000, True, 0)
    assert [(p.org, p.id) for p in directory.projects()] == [("acme", "web"), ("zeta", "default")]
    assert [p.id for p in directory.projects("acme")] == ["web"]
    assert [p.id for p in directory.budgets()] == ["web"]
    assert not directory.set_project("acme", "web", 1000, False, ME).hard_stop
    assert directory.budgets() == []


def test_every_change_is_in_the_audit_log(store: KeyStore, directory: Directory, clock: Clock) -> None:
    by = Actor("key_admin", "req_1")
    key, _ = store.create(NewKey("acme"), by)
    store.update(key.id, {"tier": "pro", "models": frozenset({"b", "a"})}, by)
    store.rotate(key.id, 60.0, by)
    store.revoke(key.id, by)
    store.revoke(key.id, by)  # changes nothing
    directory.create_org("new", by)
    directory.set_project("new", "p", 5, True, by)
    entries = directory.audit(None, 100)
    actions = ["project.set", "org.create", "key.revoke", "key.rotate", "key.update", "key.create"]
    assert [entry.action for entry in entries] == actions
    assert {(e.actor, e.request_id, e.at) for e in entries} == {("key_admin", "req_1", clock.now)}
    assert [e.target for e in entries] == ["new/p", "new", key.id, key.id, key.id, key.id]
    assert entries[4].detail == {"tier": "pro", "models": ["a", "b"]} and entries[3].detail == {"grace_s": 60.0}
    assert directory.audit(entries[1].id, 2) == entries[2:4]


# ------------------------------------------------------------------------------------------------ times
def test_durations_and_moments() -> None:
    assert [duration_s(text) for text in ("0", "90s", "5m", "1h", "30d", "2w")] == [0, 90, 300, 3600, 2592000, 1209600]
    assert moment("1970-01-02") == 86400 and moment("1970-01-01T01:00:00+01:00") == 0
    for parse in (duration_s, moment):
        for wrong in ("", "x", "-1d", "1.5h", "99999d", "99999999999d", "2030-13-01", "0001-01-01T00:00+14:00"):
            with pytest.raises(ValueError, match="write"):
                parse(wrong)


@given(st.integers(0, 4_000_000_000))
def test_a_month_ends_where_the_next_begins(at: int) -> None:
    end = month_end(at)
    assert at < end <= at + 31 * 86400
    assert month_of(end - 1) == month_of(at) != month_of(end)
    assert day_of(end).endswith("-01") and day_of(end - 1)[:7] == month_of(at)


@pytest.mark.parametrize("setting", ["postgres"], indirect=True)
def test_postgres_ends_what_takes_too_long(setting: str) -> None:
    database = Database(setting)
    with database.read() as c:
        bounds = [c.execute(sa.text(f"show {name}")).scalar_one() for name in ("statement_timeout", "lock_timeout")]
    assert bounds == ["30s", "10s"]
    with pytest.raises(DatabaseDownError, match="statement timeout"), database.read() as c:
        c.execute(sa.text("set local statement_timeout = 50"))
        c.execute(sa.text("select pg_sleep(60)"))
    database.close()

"""The gateway's cache of keys: what it asks the database, what it forgets, and what it does without a database."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from time import time as real_time

import pytest
from helpers_database import KINDS, new_database
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.accounts.database import Database
from deployments.accounts.key_cache import KeyCache
from deployments.accounts.key_store import ChangedKeys, FoundKey, KeyStore
from deployments.accounts.records import AccountError, Actor, DatabaseDownError, NewKey
from deployments.accounts.secret import new_secret

ME = Actor("cli:tests")


class Watched(KeyStore):
    """Counts calls; fails while `down`; while `held` is there, look-ups wait in their threads after they have read."""

    down = False
    held: Event | None = None

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        super().__init__(database, clock)
        self.calls: Counter[str] = Counter()
        self.has_read = Event()

    def find(self, secret: str) -> FoundKey | None:
        self.calls["find"] += 1
        self._fail()
        found = super().find(secret)
        self.has_read.set()
        if self.held is not None:
            self.held.wait()
        return found

    def changes(self, since: int | None) -> ChangedKeys:
        self.calls["changes"] += 1
        self._fail()
        return super().changes(since)

    def _fail(self) -> None:
        if self.down:
            raise DatabaseDownError("down")


class Time:
    """Both clocks."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path, time: Time) -> Iterator[Watched]:
    with new_database(request, tmp_path) as setting:
        database = Database(setting)
        database.migrate()
        yield Watched(database, time)
        database.close()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
async def cache(store: Watched, time: Time) -> AsyncIterator[KeyCache]:
    cache = KeyCache(store, fresh_s=5.0, poll_s=0.01, grace_s=60.0, clock=time, monotonic=time)
    await cache.refresh()
    yield cache
    cache.close()


@pytest.mark.sockets
@pytest.mark.slow
async def test_a_key_is_read_once_while_it_is_fresh(store: Watched, cache: KeyCache, time: Time) -> None:
    key, secret = store.create(NewKey("acme"), ME)
    await cache.refresh()
    assert [await cache.find(secret) for _ in range(3)] == [key] * 3
    assert store.calls["find"] == 1
    time.now += 5.1
    assert await cache.find(secret) == key
    assert store.calls["find"] == 2


async def test_a_change_is_seen_at_the_next_look(store: Watched, cache: KeyCache) -> None:
    key, secret = store.create(NewKey("acme"), ME)
    other, other_secret = store.create(NewKey("acme"), ME)
    await cache.refresh()
    await cache.find(secret), await cache.find(other_secret)
    store.revoke(key.id, ME)
    await cache.refresh()
    found = await cache.find(secret)
    assert found is not None and found.revoked_at is not None
    assert await cache.find(other_secret) == other
    assert store.calls["find"] == 3  # only the changed key was read again


@pytest.mark.sockets
@pytest.mark.slow
async def test_rotation_ends_the_old_secret(store: Watched, cache: KeyCache, time: Time) -> None:
    key, old = store.create(NewKey("acme"), ME)
    await cache.find(old)
    _, new = store.rotate(key.id, 3.0, ME)
    await cache.refresh()
    for secret in (old, new):
        found = await cache.find(secret)
        assert found is not None and found.id == key.id
    time.now += 3.0  # still in the cache, and not asked for again
    assert await cache.find(old) is None
    assert await cache.find(new) is not None


async def test_unknown_keys_are_asked_for_once_in_a_while(store: Watched, cache: KeyCache, time: Time) -> None:
    secret = new_secret()
    for wrong in (secret, secret, "sk-demo", "x" * 5000):
        assert await cache.find(wrong) is None
    assert store.calls["find"] == 1
    store.create(NewKey("acme"), ME)
    await cache.refresh()  # any change may have made it known
    await cache.find(secret)
    time.now += 2.1
    await cache.find(secret)
    assert store.calls["find"] == 3


@pytest.mark.parametrize("known", [True, False])
async def test_caches_are_bounded(store: Watched, time: Time, known: bool) -> None:
    cache = KeyCache(store, 5.0, 0.01, 60.0, clock=time, monotonic=time, max_known=2, max_unknown=2)
    secrets = [store.create(NewKey("acme"), ME)[1] if known else new_secret() for _ in range(3)]
    await cache.refresh()
    reads = []
    for secret in (*secrets, *reversed(secrets)):
        await cache.find(secret)
        reads.append(store.calls["find"])
    assert reads == [1, 2, 3, 3, 3, 4]  # the first of three is forgotten
    cache.close()


async def test_one_query_for_many_that_ask_at_once(store: Watched, cache: KeyCache) -> None:
    key, secret = store.create(NewKey("acme"), ME)
    await cache.refresh()
    store.held = Event()
    asking = [asyncio.create_task(cache.find(secret)) for _ in range(20)]
    await asyncio.sleep(0)
    asking[0].cancel()  # who leaves does not take the others along
    store.held.set()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert answers[1:] == [key] * 19 and isinstance(answers[0], asyncio.CancelledError)
    assert store.calls["find"] == 1


async def test_what_was_read_before_a_change_is_not_kept_after_it(store: Watched, cache: KeyCache) -> None:
    """The look-up reads, the key is revoked, the cache sees that, and only then does the look-up come back."""
    key, secret = store.create(NewKey("acme"), ME)
    await cache.refresh()
    store.held = Event()
    slow = asyncio.create_task(cache.find(secret))
    await asyncio.sleep(0)
    await asyncio.to_thread(store.has_read.wait)
    store.revoke(key.id, ME)
    await cache.refresh()
    store.held.set()
    await slow
    found = await cache.find(secret)
    assert found is not None and found.revoked_at is not None


async def test_an_outage(store: Watched, cache: KeyCache, time: Time, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    key, secret = store.create(NewKey("acme"), ME)
    _, unused = store.create(NewKey("acme"), ME)
    await cache.refresh()
    await cache.find(secret)
    store.down = True
    for _ in range(3):
        with pytest.raises(DatabaseDownError):
            await cache.refresh()
    finds = store.calls["find"]
    time.now += 59.0
    assert await cache.find(secret) == key  # in use before: goes on
    for other in (unused, new_secret()):
        with pytest.raises(DatabaseDownError):  # nobody can say whether these are keys
            await cache.find(other)
    time.now += 2.0
    with pytest.raises(DatabaseDownError):  # the grace time is over
        await cache.find(secret)
    assert store.calls["find"] == finds  # it is known to be down: nobody waits for it
    assert await cache.find("not-one-of-ours") is None
    store.down = False
    await cache.refresh()
    assert await cache.find(secret) == key and await cache.find(unused) is not None
    assert [r.levelname for r in caplog.records if "database" in r.message] == ["ERROR", "WARNING"]
    assert not any(s in caplog.text for s in (secret, unused))


async def test_an_outage_that_starts_between_two_looks(store: Watched, cache: KeyCache, time: Time) -> None:
    key, secret = store.create(NewKey("acme"), ME)
    await cache.refresh()
    await cache.find(secret)
    store.down = True
    time.now += 6.0
    assert await cache.find(secret) == key


async def test_a_revocation_during_an_outage_is_seen_after_it(store: Watched, cache: KeyCache) -> None:
    key, secret = store.create(NewKey("acme"), ME)
    await cache.refresh()
    await cache.find(secret)
    store.down = True
    with pytest.raises(DatabaseDownError):
        await cache.refresh()
    store.revoke(key.id, ME)
    store.down = False
    await cache.refresh()
    found = await cache.find(secret)
    assert found is not None and found.revoked_at is not None


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from(["create", "revoke", "disable", "rotate", "look", "find"]), st.integers(0, 5)))
)
async def test_after_a_look_the_ring_says_what_the_store_says(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    database = Database(str(tmp_path_factory.mktemp("cache") / "keys.db"))
    database.migrate()
    time = Time()
    store = Watched(database, time)
    cache = KeyCache(store, fresh_s=1e9, poll_s=1.0, grace_s=60.0, clock=time, monotonic=time)
    await cache.refresh()
    ids, secrets = [store.create(NewKey("acme"), ME)[0].id], [new_secret()]
    for step, which in steps:
        key_id = ids[which % len(ids)]
        time.now += 1.0
        with suppress(AccountError):  # the key is revoked
            match step:
                case "create":
                    key, secret = store.create(NewKey("acme"), ME)
                    ids.append(key.id)
                    secrets.append(secret)
                case "revoke":
                    store.revoke(key_id, ME)
                case "disable":
                    store.update(key_id, {"disabled": which % 2 == 0}, ME)
                case "rotate":
                    secrets.append(store.rotate(key_id, 2.0 * which, ME)[1])
                case "look":
                    await cache.refresh()
                case "find":
                    await cache.find(secrets[which % len(secrets)])
    await cache.refresh()
    for secret in secrets:
        found = store.find(secret)
        alive = found is not None and (found.until is None or found.until > time.now)
        assert await cache.find(secret) == (found.key if found is not None and alive else None)
    cache.close()
    database.close()


async def test_watching_prepares_and_keeps_up(tmp_path: Path) -> None:
    database = Database(str(tmp_path / "late.db"))
    store, tries = Watched(database, real_time), Counter[str]()

    def prepare() -> None:
        tries["prepare"] += 1
        if tries["prepare"] < 3:
            raise DatabaseDownError("not yet")
        database.migrate()

    cache = KeyCache(store, fresh_s=60.0, poll_s=0.01, grace_s=60.0, prepare=prepare)
    watch = asyncio.create_task(cache.watch())
    try:
        while not store.calls["changes"]:
            await asyncio.sleep(0.005)
        assert tries["prepare"] == 3
        key, secret = await asyncio.to_thread(store.create, NewKey("acme"), ME)
        assert await cache.find(secret) == key
        await asyncio.to_thread(store.revoke, key.id, ME)
        while (found := await cache.find(secret)) is not None and found.revoked_at is None:
            await asyncio.sleep(0.005)
        assert found is not None
    finally:
        watch.cancel()
        cache.close()
        database.close()


async def test_a_flood_of_new_secrets_does_not_pile_up(store: Watched, cache: KeyCache) -> None:
    store.held = Event()
    asking = [asyncio.create_task(cache.find(new_secret())) for _ in range(100)]
    await asyncio.sleep(0)
    store.held.set()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert [isinstance(a, DatabaseDownError) for a in answers] == [False] * 64 + [True] * 36


async def test_a_flood_of_invented_keys_keeps_nobody_out(store: Watched, cache: KeyCache, time: Time) -> None:
    key, secret = store.create(NewKey("acme"), ME)
    await cache.refresh()
    late_key, late_secret = store.create(NewKey("acme"), ME)  # its prefix will be known at the next look
    store.held = Event()
    flood = [asyncio.create_task(cache.find(new_secret())) for _ in range(100)]
    await until(lambda: store.calls["find"] == 1)
    finding = asyncio.create_task(cache.find(secret))
    await until(lambda: store.calls["find"] == 2)  # it does not stand behind the invented ones
    store.held.set()
    assert await finding == key
    outcomes = await asyncio.gather(*flood, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {type(None), DatabaseDownError}
    await cache.refresh()
    assert await cache.find(late_secret) == late_key


async def test_a_key_works_before_the_next_look_too(store: Watched, cache: KeyCache) -> None:
    key, secret = store.create(NewKey("acme"), ME)
    assert await cache.find(secret) == key


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)

"""The ledger: sums, nothing lost, nothing twice; and budgets."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from helpers_database import KINDS, new_database
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.accounts.budget import Budgets
from deployments.accounts.database import Database
from deployments.accounts.directory import Directory
from deployments.accounts.ledger_spill import SpillFile
from deployments.accounts.ledger_store import LedgerStore
from deployments.accounts.ledger_writer import LedgerWriter
from deployments.accounts.periods import moment
from deployments.accounts.records import Actor, DatabaseDownError
from deployments.accounts.running_file import RunningFile
from deployments.accounts.usage_entry import UsageEntry

ME = Actor("cli:tests")
AT = moment("2030-05-31T23:59:00")
ENTRY = UsageEntry("run-0", AT, "acme", "web", "key_1", "m", "/v1/completions", "r", 200, 10, 4, 5, 0.1, 0.5)


def entries(count: int, run: str = "run", **changes: object) -> list[UsageEntry]:
    return [replace(ENTRY, uid=f"{run}-{i}", **changes) for i in range(count)]  # type: ignore[arg-type]


class Flaky(LedgerStore):
    """Fails while `down`, also after it has written when `after`."""

    down = False
    after = False

    def add(self, entries: Sequence[UsageEntry]) -> None:
        if self.down and not self.after:
            raise DatabaseDownError("down")
        super().add(entries)
        if self.down:
            raise DatabaseDownError("the answer was lost")


class Rig:
    def __init__(self, tmp_path: Path, setting: str) -> None:
        self.database = Database(setting)
        self.database.migrate()
        self.store = Flaky(self.database)
        self.directory = Directory(self.database, lambda: AT)
        self.spill_dir = tmp_path / "spill"
        self.budgets = Budgets(self.directory, lambda: AT)
        self.start("run")

    def start(self, run: str, **limits: int) -> None:
        """A new gateway takes the place of the one there was."""
        self.spill = SpillFile(self.spill_dir, run)
        self.writer = self.make(self.spill, run, **limits)

    def make(self, spill: SpillFile, run: str, **limits: int) -> LedgerWriter:
        """Its thread is not started: tests flush by hand."""
        return LedgerWriter(run, self.store, spill, self.budgets, 3600.0, **limits)

    def count(self) -> int:
        return int(sum(row["requests"] for row in self.store.usage(())))

    def files(self) -> list[str]:
        return sorted(path.name for path in self.spill_dir.glob("*"))


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    with new_database(request, tmp_path) as setting:
        rig = Rig(tmp_path, setting)
        yield rig
        rig.database.close()


# ------------------------------------------------------------------------------------------------ the store
def test_sums_by_anything(rig: Rig) -> None:
    rig.store.add(
        [
            ENTRY,
            replace(ENTRY, uid="b", at=AT + 120, key_id="key_2", org="zeta"),
            replace(ENTRY, uid="c", model="n", prompt_tokens=1, cached_tokens=0, completion_tokens=2),
        ]
    )
    whole = {"requests": 3, "prompt_tokens": 21, "cached_tokens": 8, "completion_tokens": 12, "total_tokens": 33}
    assert rig.store.usage(()) == [whole]
    by_day = [(row["day"], row["model"], row["total_tokens"]) for row in rig.store.usage(("day", "model"))]
    assert by_day == [("2030-05-31", "m", 15), ("2030-05-31", "n", 3), ("2030-06-01", "m", 15)]
    assert [(row["key"], row["requests"]) for row in rig.store.usage(["key"])] == [("key_1", 2), ("key_2", 1)]
    assert [row["requests"] for row in rig.store.usage(["org", "project"], org="zeta")] == [1]
    assert rig.store.usage((), since=AT + 1)[0]["requests"] == 1
    assert rig.store.usage((), until=AT + 120)[0]["requests"] == 2
    assert rig.store.usage((), since=AT + 500)[0] == dict.fromkeys(whole, 0)
    assert rig.store.usage(["day"], since=AT + 500) == []


def test_what_is_added_twice_counts_once(rig: Rig) -> None:
    rig.directory.set_project("acme", "web", 1000, True, ME)
    rig.store.add(entries(3))
    rig.store.add(entries(5))
    rig.store.add([ENTRY, ENTRY])
    assert rig.count() == 5
    assert rig.directory.projects()[0].spent_tokens == 5 * 15
    rig.store.add(entries(1, "june", at=AT + 120))
    assert rig.directory.projects()[0].spent_tokens == 5 * 15  # May's


def test_many_add_the_same_at_once(rig: Rig) -> None:
    rig.directory.set_project("acme", "web", 1000, True, ME)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: rig.store.add(entries(20 + i)), range(8)))
    assert rig.count() == 27 and rig.directory.projects()[0].spent_tokens == 27 * 15


# ------------------------------------------------------------------------------------------------ writer and spill
def test_a_clean_stop_loses_nothing(rig: Rig) -> None:
    rig.writer.start()
    for entry in entries(1234):
        rig.writer.add(entry)
    rig.writer.close()
    assert rig.count() == 1234 and rig.files() == []


def test_many_entries_wake_the_writer(rig: Rig) -> None:
    rig.writer.start()
    for entry in entries(500):
        rig.writer.add(entry)
    while rig.count() < 500:
        threading.Event().wait(0.01)
    rig.writer.close()


def test_while_the_database_is_down_a_file_has_them(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.store.down = True
    for part in (entries(600), entries(2, "run-b")):
        for entry in part:
            rig.writer.add(entry)
        rig.writer.flush()
    assert rig.count() == 0
    [path] = rig.spill_dir.glob("*")
    assert len(path.read_bytes().splitlines()) == 602 and path.stat().st_mode & 0o077 == 0
    rig.store.down = False
    rig.writer.add(replace(ENTRY, uid="run-last"))
    rig.writer.flush()
    assert rig.count() == 603 and rig.files() == []
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1  # one outage, one line
    rig.store.down = True
    rig.writer.add(replace(ENTRY, uid="run-again"))
    rig.writer.start()
    rig.writer.close()  # also a stop during an outage
    rig.store.down = False
    assert rig.count() == 603 and len(rig.files()) == 1


def test_a_lost_answer_does_not_count_twice(rig: Rig) -> None:
    rig.store.down = rig.store.after = True
    for entry in entries(3):
        rig.writer.add(entry)
    rig.writer.flush()
    assert rig.count() == 3 and len(rig.files()) == 1
    rig.store.down = False
    rig.writer.flush()
    assert rig.count() == 3 and rig.files() == []


def test_the_next_gateway_takes_over_a_dead_ones_file(rig: Rig) -> None:
    rig.spill_dir.mkdir()
    lines = [orjson.dumps({name: getattr(e, name) for name in UsageEntry.__slots__}) for e in entries(3, "dead")]
    (rig.spill_dir / "usage-dead.jsonl").write_bytes(b"\n".join(lines) + b'\n{"uid": "cut sho')
    rig.writer.flush()
    assert rig.count() == 3 and rig.files() == []


def test_a_living_gateways_file_is_left_alone(rig: Rig) -> None:
    rig.store.down = True
    rig.writer.add(ENTRY)
    rig.writer.flush()
    rig.store.down = False
    other = rig.make(SpillFile(rig.spill_dir, "other"), "other")
    other.flush()
    assert rig.count() == 0 and len(rig.files()) == 1
    rig.writer.flush()
    assert rig.count() == 1 and rig.files() == []


def test_two_may_replay_the_same_directory(rig: Rig) -> None:
    rig.spill_dir.mkdir()
    for run in "abcdefgh":
        dead = SpillFile(rig.spill_dir, run)
        dead.append(entries(20, run))
        dead.close()
    spills = [SpillFile(rig.spill_dir, f"live{i}") for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda spill: spill.replay(rig.store.add), spills))
    assert rig.count() == 160 and rig.files() == []


def test_a_full_queue_loses_entries_and_says_so(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Only when neither database nor disk takes any; the caller neither waits nor fails."""
    rig.directory.set_project("acme", "web", 100, True, ME)
    rig.start("run", max_queued=5)
    rig.writer.flush()
    for entry in entries(8):
        rig.writer.add(entry)
    assert not rig.spill_dir.exists()
    assert rig.budgets.check("acme", "web") is not None  # all eight are charged
    rig.writer.flush()
    assert rig.count() == 5 and "3 ledger entries are lost" in caplog.text


def test_a_full_disk_leaves_no_half_line(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.spill.append(entries(1, "a"))

    def full(file: int, data: bytes, at: int) -> None:
        os.pwrite(file, data[: len(data) // 2], at)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("deployments.accounts.ledger_spill.write_all", full)
        with pytest.raises(OSError, match="No space"):
            rig.spill.append(entries(1, "b"))
    rig.spill.append(entries(1, "c"))
    rig.spill.close()
    rig.writer.flush()
    assert rig.count() == 2 and rig.files() == []


@pytest.mark.parametrize("rig", ["postgres"], indirect=True)
def test_an_entry_that_the_database_refuses_holds_up_no_other(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for entry in (*entries(2), replace(ENTRY, uid="run-long", path="/" * 65), *entries(2, "run-b")):
        rig.writer.add(entry)
    rig.writer.flush()
    assert rig.count() == 4 and rig.files() == [] and "refuses a ledger entry" in caplog.text


def test_what_running_requests_have_used_outlives_a_kill(rig: Rig) -> None:
    running = entries(3, "dead")
    file = RunningFile(rig.spill_dir, "dead")
    LedgerWriter("dead", rig.store, SpillFile(rig.spill_dir, "dead"), rig.budgets, 60.0, lambda: running, file).flush()
    rig.writer.flush()
    assert rig.count() == 0 and rig.files() == ["running-dead.jsonl"]  # it lives
    running = [replace(ENTRY, uid="dead-1", completion_tokens=50)]
    rig.store.add([replace(ENTRY, uid="dead-0")])  # has ended meanwhile
    file.write(running)
    for fd in Path("/proc/self/fd").iterdir():  # as a kill does
        if fd.exists() and fd.readlink().name == "running-dead.jsonl":
            os.close(int(fd.name))
    rig.writer.flush()
    assert rig.count() == 2 and rig.files() == []
    assert rig.store.usage(())[0]["completion_tokens"] == 55


def test_a_clean_stop_leaves_no_file_of_running_requests(rig: Rig) -> None:
    file = RunningFile(rig.spill_dir, "live")
    writer = LedgerWriter("live", rig.store, SpillFile(rig.spill_dir, "live"), rig.budgets, 60.0, lambda: [ENTRY], file)
    writer.start()
    writer.flush()
    assert rig.files() == ["running-live.jsonl"]
    writer.close()
    assert rig.files() == []


def test_without_database_and_file_entries_wait(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.spill_dir.mkdir()
    path = rig.spill_dir / "usage-run.jsonl"
    rig.store.down = True
    with path.open("w") as other:  # somebody else's: can't be written
        fcntl.flock(other, fcntl.LOCK_EX)
        for entry in entries(3):
            rig.writer.add(entry)
        rig.writer.flush()
        assert "keeps waiting" in caplog.text
    rig.store.down = False
    rig.writer.flush()
    assert rig.count() == 3


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["add", "flush", "down", "lost", "up", "die"]), max_size=20))
def test_whatever_happens_every_entry_is_there_once(tmp_path_factory: pytest.TempPathFactory, steps: list[str]) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    rig = Rig(folder, str(folder / "keys.db"))
    added, run = 0, 0
    for step in steps:
        match step:
            case "add":
                rig.writer.add(replace(ENTRY, uid=f"r{run}-{added}"))
                added += 1
            case "flush":
                rig.writer.flush()
            case "down" | "lost":
                rig.store.down, rig.store.after = True, step == "lost"
            case "up":
                rig.store.down = False
            case "die":  # after its last flush
                rig.writer.flush()
                rig.spill.close()
                run += 1
                rig.start(f"r{run}")
    rig.store.down = False
    rig.writer.flush()
    assert rig.count() == added and rig.files() == []
    rig.database.close()


# ------------------------------------------------------------------------------------------------ budgets
def test_a_budget_counts_what_is_stored_and_what_is_not_yet(rig: Rig) -> None:
    rig.directory.set_project("acme", "web", 45, True, ME)
    rig.writer.flush()
    for entry, used in zip(entries(3), (0, 15, 30), strict=True):
        assert rig.budgets.check("acme", "web") is None, used
        rig.writer.add(entry)
    exhausted = rig.budgets.check("acme", "web")
    assert exhausted is not None and (exhausted.limit, exhausted.used) == (45, 45)
    assert exhausted.opens_in_s == pytest.approx(60.0)
    rig.writer.flush()
    assert rig.budgets.check("acme", "web") == exhausted  # stored now, and not counted twice
    assert rig.budgets.check("acme", "other") is None and rig.budgets.check("zeta", "web") is None
    rig.directory.set_project("acme", "web", 46, True, ME)
    rig.writer.flush()
    assert rig.budgets.check("acme", "web") is None


def test_budgets_in_an_outage(rig: Rig) -> None:
    rig.directory.set_project("acme", "web", 45, True, ME)
    rig.writer.flush()
    rig.store.down = True
    for entry in entries(3):
        rig.writer.add(entry)
        rig.writer.flush()
    assert rig.budgets.check("acme", "web") is not None  # its own requests count all the same
    rig.store.down = False
    rig.writer.flush()
    exhausted = rig.budgets.check("acme", "web")
    assert exhausted is not None and exhausted.used == 45


def test_gateways_learn_from_each_other(rig: Rig) -> None:
    rig.directory.set_project("acme", "web", 45, True, ME)
    there = Budgets(rig.directory, lambda: AT)
    other = LedgerWriter("other", rig.store, SpillFile(rig.spill_dir, "other"), there, 3600.0)
    for entry in entries(2, "other"):
        other.add(entry)
    rig.writer.add(ENTRY)
    for writer in (other, rig.writer, other):
        writer.flush()
    for budgets in (there, rig.budgets):
        exhausted = budgets.check("acme", "web")
        assert exhausted is not None and exhausted.used == 45


def test_a_soft_budget_stops_nobody(rig: Rig) -> None:
    rig.directory.set_project("acme", "web", 0, False, ME)
    rig.writer.flush()
    assert rig.budgets.check("acme", "web") is None
    rig.directory.set_project("acme", "web", 0, True, ME)
    rig.writer.flush()
    assert rig.budgets.check("acme", "web") is not None

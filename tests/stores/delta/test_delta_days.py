"""A year of the ledger's log: nobody needs all of it at once, and purges read each day once."""

from __future__ import annotations

import datetime as dt
import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from checkpoint.position import Partition
from checkpoint.records import RecordFilter
from deadletter.store import KEYS
from dedup.delta import DeltaStore, ledger, ledger_log
from dedup.delta.compaction import compact
from dedup.delta.ledger import LOG, Ledger
from kit import delta_kit as kit
from kit.clock import showing
from kit.delta_kit import open_store

pytestmark = pytest.mark.delta

FIRST = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)


class Days:
    """A store of which each decision is made on the day that the test names, and what it reads of the log."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.read, self.at_once = FIRST, list[dt.date](), 0
        for module in ("transaction", "upkeep", "store", "epoch", "tending"):
            monkeypatch.setattr(f"dedup.delta.{module}.dt", showing(lambda tz: self.now))
        reads = Ledger.read

        def noted(ledger: Ledger, files: Any, *rest: Any) -> Any:
            of_log = [file.day for file in files if file.section == LOG]
            self.read, self.at_once = self.read + of_log, max(self.at_once, len(set(of_log)))
            return reads(ledger, files, *rest)

        monkeypatch.setattr(Ledger, "read", noted)
        self.store: DeltaStore = open_store(folder)
        self.epoch = kit.epoch(self.store)
        self.batches, self.positions = itertools.count(), itertools.count()

    def decide(self, day: int, position: int, partition: int = 0, minute: int = 0) -> None:
        """One event."""
        self.now = FIRST + dt.timedelta(days=day, minutes=minute)
        number = next(self.batches)
        kit.process(self.store, self.epoch, kit.events([number], position, number=partition), number)

    def purge(self, day: int, before: int) -> dict[Partition, int]:
        """The floors afterwards; `read` has the days that it took."""
        self.now = FIRST + dt.timedelta(days=day)
        self.store.head(kit.NAME)
        self.read.clear()
        self.store.purge(kit.NAME, date(before), by="ann", reason="", although_behind=True)
        return dict(self.store.head(kit.NAME).floors)

    def upkeep(self, day: int) -> tuple[int, bool]:
        """Forget what was reserved before that day: how many keys, and whether it says that more is kept."""
        done = self.store.forget(kit.NAME, date(day), by="upkeep", although_behind=True)
        return done.count, bool(done.kept)

    def known(self) -> list[int]:
        """Which of the events are known."""
        numbers = range(20)
        with self.store.begin(kit.NAME, self.epoch) as tx:
            found = tx.known(pa.table([pa.array(map(kit.key_bytes, numbers), pa.binary(16)), pa.array(numbers, pa.int64())], schema=KEYS))
        return [number for number in numbers if kit.key_bytes(number) in found["key"].to_pylist()]

    def files(self) -> list[ledger.LedgerFile]:
        """Of keys, in the order of decisions."""
        with self.store._states.existing(kit.NAME) as state:
            return [file for file in state.ledger.files_now() if file.section == ledger.KEYS]


def date(day: int) -> dt.date:
    """Of that day of the test."""
    return (FIRST + dt.timedelta(days=day)).date()


@pytest.fixture
def days(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Days:
    """From the first of March on."""
    return Days(folder, monkeypatch)


def test_purges_one_after_another_know_the_highest_position_of_each_partition(days: Days) -> None:
    """Also after one that asked for days to come, after one that asked for less than the one before, and for a partition that is idle."""
    one, other = kit.partition(0), kit.partition(1)
    days.decide(0, 10)
    days.decide(1, 20)
    days.decide(1, 5, partition=1)
    assert days.purge(5, 1) == {one: 10}
    days.decide(5, 30)
    assert days.purge(6, 60) == {one: 30, other: 5}, "all days, and those to come"
    days.decide(6, 40)
    days.decide(8, 7, partition=1)
    assert days.purge(9, 3) == {one: 30, other: 5}, "less than the one before"
    days.decide(10, 50)
    assert days.purge(30, 9) == {one: 40, other: 7}, "what was decided since the one that asked for days to come"
    assert days.purge(90, 70) == {one: 50, other: 7}


@pytest.mark.full
def test_each_day_of_the_log_is_read_once(days: Days) -> None:
    """By the purge that gives it up; the days before are in the head, the days after are of no interest."""
    for day in range(30):
        days.decide(day, day)
    days.purge(30, 10)
    assert {*days.read} - {date(30)} == {date(day) for day in range(10)}, "and its own day"
    days.purge(31, 13)
    assert {*days.read} - {date(31)} == {date(10), date(11), date(12)}


@pytest.mark.full
def test_where_a_consumer_is_stands_in_the_last_days_of_its_batches(days: Days) -> None:
    """A partition that was read within the hour before the last batch counts; epochs since then tell nothing, and cost a look each."""
    for day in range(26):
        days.decide(day, day)
    for day in range(26, 30):
        days.now = FIRST + dt.timedelta(days=day)
        days.epoch = kit.epoch(days.store)
    days.now = FIRST.replace(month=6)
    days.store.head(kit.NAME)
    days.read.clear()
    bound = days.store.purge_bound(kit.NAME, date(60))
    assert bound is not None and bound.read_to == FIRST + dt.timedelta(days=25)
    assert days.read == [date(day) for day in (29, 28, 27, 26, 25)]


def test_of_a_busy_day_the_last_hour_tells_where_a_consumer_is(days: Days, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few decisions at a time are read, also where a compaction has put them into one file, and none of before that hour."""
    read = list[list[int]]()
    rows_of = ledger.rows_of
    monkeypatch.setattr(ledger_log, "PORTION", 2)
    monkeypatch.setattr(ledger, "rows_of", lambda *given: read.append((rows := rows_of(*given))["seq"].to_pylist()) or rows)
    for minute in range(0, 200, 20):
        days.decide(0, minute, partition=minute // 20 % 2, minute=minute)
    compact(DeltaTable(days.store.path + f"/ledger/{kit.NAME}"), None, 2**20, 2)
    days.store.head(kit.NAME)
    read.clear()
    bound = days.store.purge_bound(kit.NAME, date(60))
    assert bound is not None and bound.read_to == FIRST + dt.timedelta(minutes=180)
    assert max(map(len, read)) <= 6 and min(min(seqs) for seqs in read) > 5, read


def test_a_purge_has_few_decisions_of_a_busy_day_in_memory(days: Days, monkeypatch: pytest.MonkeyPatch) -> None:
    """And knows the highest position of each partition all the same."""
    monkeypatch.setattr(ledger_log, "PORTION", 2)
    for minute in range(7):
        days.decide(0, 100 + minute, partition=minute % 3, minute=minute)
    assert days.purge(5, 1) == {kit.partition(0): 106, kit.partition(1): 104, kit.partition(2): 105}


@pytest.mark.full
def test_verify_has_one_day_of_the_log_in_memory(days: Days) -> None:
    """A year of decisions a minute apart would take gigabytes."""
    for day in range(5):
        days.decide(day, day)
    days.store.head(kit.NAME)
    days.read, days.at_once = [], 0
    assert days.store.problems(kit.NAME) == []
    assert (days.at_once, set(days.read)) == (1, {date(day) for day in range(5)})


@pytest.mark.full
def test_a_page_of_batch_records_reads_the_files_that_have_it(days: Days) -> None:
    """`verify` goes through the records page by page: each page would read all that comes after it."""
    for day in range(5):
        days.decide(day, day)
    first, *_, last = days.store.batches(kit.NAME)["seq"].to_pylist()
    days.read.clear()
    found = days.store.batches(kit.NAME, RecordFilter(first, last - 2))
    assert found["seq"].to_pylist() == [first + 1, first + 2] and days.read == [date(1), date(2)]


@pytest.mark.parametrize("late", [35, 3])
def test_keys_of_a_host_whose_clock_is_late_are_purged_no_earlier(days: Days, late: int, caplog: pytest.LogCaptureFixture) -> None:
    """By the order of decisions they are as old as those beside them, also in the first month and in one file with keys of that day."""
    for day in (0, 34, 35, 35 - late, 35 - late, 36):
        days.decide(day, next(days.positions))
    compact(DeltaTable(days.store.path + f"/ledger/{kit.NAME}"), None, 2**20, 2)
    days.now = FIRST + dt.timedelta(days=37)
    old = int(late == 3)
    assert days.upkeep(35) == (old, True)
    assert days.known() == [0, 1, 2, 3, 4, 5][old:]
    days.now = FIRST + dt.timedelta(days=70)
    assert days.upkeep(36) == (5 - old, False) and days.known() == [5]
    assert len([told for told in caplog.messages if "clock shows" in told]) == 1, "once, until the clock is right again"


@pytest.mark.parametrize("ahead", [400, 5])
def test_a_host_whose_clock_was_ahead_makes_no_later_key_stay(days: Days, ahead: int) -> None:
    """Its own keys stay until the day that it gave them has gone; those before and after it go in their time."""
    days.decide(0, 0)
    days.decide(1 + ahead, 1)
    days.decide(2, 2)
    days.decide(60, 3)
    days.now = FIRST + dt.timedelta(days=61)
    assert days.upkeep(60) == (3 - (ahead == 400), False)
    assert days.known() == ([1] if ahead == 400 else []) + [3]


def test_a_decision_is_dated_no_earlier_than_the_one_before_within_an_hour(days: Days) -> None:
    """Hosts that differ by minutes at midnight give a ledger one day after another."""
    days.decide(3, 1, minute=-710)
    days.decide(2, 2, minute=710)
    days.decide(1, 3)
    days.decide(4, 4)
    assert [file.day for file in days.files()] == [date(3), date(3), date(1), date(4)]

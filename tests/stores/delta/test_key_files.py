"""Files of keys: a start opens them in place of reading the ledger, and nothing that is wrong with them gives a wrong answer."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.errors import StoreUnavailable
from checkpoint.holders import take_epoch
from deadletter.selection import Selection
from deadletter.store import KEYS, Commit
from dedup.delta import DeltaStore, key_files, keys
from dedup.delta.key_files import HELD, DamagedKeys, KeyFolder, KeyRows, NewFile, StoredRun
from dedup.delta.keys import Joining, KeyIndex
from dedup.delta.ledger import Ledger
from dedup.delta.state import ConsumerState
from kit import delta_kit as kit
from kit.delta_kit import open_store
from kit.paths import environment

pytestmark = pytest.mark.delta

TINY = {"flush_rows": 4, "run_rows": 24}


@pytest.fixture(autouse=True)
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few keys make files, and files are joined."""
    for name, value in (("FLUSH_ROWS", 4), ("RUN_ROWS", 24), ("SLICE_ROWS", 5), ("MOST_SMALL", 3)):
        monkeypatch.setattr(keys, name, value)


def key(number: int) -> bytes:
    """Keys in no order, from the lowest to the highest; some share their first half."""
    return (number * 7919 % 13 * (2**64 // 13)).to_bytes(8, "big") + (number * 104729 % 2**64).to_bytes(8, "big")


def column(numbers: Any) -> pa.Array:
    """Of keys."""
    return pa.array([key(number) for number in numbers], pa.binary(16))


class Life:
    """An index and what it has to know."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = KeyFolder(folder), KeyIndex(KeyFolder(folder), **TINY)
        self.truth = dict[int, tuple[int, int]]()  # number -> payload, day
        self.kept = (dict(self.truth), 0)
        self.since, self.decisions = 0, 0

    def do(self, what: str, numbers: list[int], day: int) -> None:
        """One change, or a start."""
        if what == "add":
            self.index.add(column(numbers), np.array(numbers) * 3, day)
            for number in numbers:
                _, known_since = self.truth.get(number, (0, 0))
                self.truth[number] = (number * 3, max(known_since, day, self.since))
        elif what == "free":
            self.index.discard(column(numbers))
            self.truth = {n: told for n, told in self.truth.items() if n not in numbers}
        elif what == "purge":
            self.since = max(self.since, day)
            self.index.forget_before(self.since)
            self.truth = {n: told for n, told in self.truth.items() if told[1] >= self.since}
        elif what == "keep":
            self.decisions += 1
            self.index.keep("table", 0, self.decisions, "attempt")
            if (saved := self.folder.load()) is not None and saved.seq == self.decisions:
                self.kept = dict(self.truth), self.since  # else a start reads what is new from the ledger, frees too
        elif (listed := self.folder.load()) is not None:
            self.index = KeyIndex(self.folder, self.folder.open(listed), **TINY)
            self.truth, self.since = dict(self.kept[0]), self.kept[1]
            self.index.forget_before(self.since)

    def check(self) -> None:
        """All answers."""
        known, payload, held = self.index.probe(column(range(60)))
        assert known.tolist() == [n in self.truth for n in range(60)]
        assert payload.tolist() == [self.truth.get(n, (0, 0))[0] for n in range(60)]
        assert held.tolist() == [self.truth.get(n, (0, 0))[1] == HELD for n in range(60)]
        assert len(self.index) == len(self.truth)


CHANGE = st.tuples(
    st.sampled_from(["add", "add", "add", "free", "purge", "keep", "start"]),
    st.lists(st.integers(0, 59), max_size=12),
    st.sampled_from([1, 2, 3, 4, 5, HELD]),
)


def pages_of(count: int) -> Any:
    """Pages of so few keys, and few of them at once: a file has many."""
    page = np.dtype([(name, (of.subdtype or (of, ()))[0], count) for name, (of, _) in (key_files.PAGE.fields or {}).items()])
    return mock.patch.multiple(key_files, PAGE_KEYS=count, PAGE=page, AT_ONCE=2)


@settings(max_examples=300, deadline=None)
@given(st.lists(CHANGE, max_size=25), st.sampled_from([1, 3, 512]))
def test_an_index_that_is_opened_again_answers_like_a_dictionary(changes: list[tuple[str, list[int], int]], page_keys: int) -> None:
    """Keys come, are freed and purged, files of one page and of many are written, joined and opened, in any order."""
    with pages_of(page_keys), key_files.tempfile.TemporaryDirectory() as folder:
        life = Life(Path(folder, "keys"))
        for what, numbers, day in changes:
            life.do(what, numbers, min(day, 5) if what == "purge" else day)
            life.check()


def test_a_key_that_is_freed_while_files_are_joined_stays_free(tmp_path: Path) -> None:
    """Whichever key, and however far the new file is written: the joined file does not bring it back."""
    for gone in range(0, 40, 3):
        for flushes in range(6):
            index = KeyIndex(KeyFolder(tmp_path / f"{gone}-{flushes}"), **TINY)
            for number in range(0, 12, 4):
                index.add(column(range(number, number + 4)), np.arange(4), 1)
            for first in range(12, 12 + 4 * flushes, 4):
                index.add(column(range(first, first + 4)), np.arange(4), 1)
            index.discard(column([gone]))
            for first in range(40, 80, 4):
                index.add(column(range(first, first + 4)), np.arange(4), 1)
            assert not index.probe(column([gone]))[0][0] and any(len(run) > 4 for run in index._stored)


def made(path: Path, count: int = 1500) -> StoredRun:
    """A file of three pages, closed."""
    numbers = sorted(range(count), key=key)
    high, low = keys.key_words(column(numbers))
    file = NewFile(path, count)
    file.add(KeyRows(high, low, np.array(numbers, np.int64), np.full(count, 9, np.uint16)))
    run = file.finish()
    assert run is not None
    return run


def test_no_changed_byte_changes_an_answer(tmp_path: Path) -> None:
    """Wherever one byte is another, or the file ends: the answers are right, or DamagedKeys is raised."""
    assert made(tmp_path / "whole").find(*keys.key_words(column(range(1600)))).found.sum() == 1500
    content, dice, refused = (tmp_path / "whole").read_bytes(), random.Random(1), 0
    for at in [*dice.sample(range(len(content)), 300), *range(len(content) - 40, len(content))]:
        damaged = bytearray(content)
        damaged[at] ^= 1 << dice.randrange(8)
        for text in (bytes(damaged), content[:at], content[:at] + bytes(len(content) - at)):
            path = tmp_path / "damaged" / "whole"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(text)
            try:
                run = StoredRun.open(path)
                hits = run.find(*keys.key_words(column(range(1600))))
                assert hits.found.tolist() == [n < 1500 for n in range(1600)] and hits.payload.tolist() == list(range(1500))
            except DamagedKeys:
                refused += 1
            path.unlink()
    assert refused > 1000, "nearly all of them are noticed; the others changed what nobody reads"


def test_no_byte_that_changes_while_a_file_is_open_changes_an_answer(tmp_path: Path) -> None:
    """Each page has been used before: the answers stay right, or DamagedKeys is raised."""
    made(tmp_path / "whole")
    content, dice, refused = (tmp_path / "whole").read_bytes(), random.Random(2), 0
    for at in dice.sample(range(3 * key_files.PAGE.itemsize), 200):
        damaged = bytearray(content)
        damaged[at] ^= 1 << dice.randrange(8)
        for text in (bytes(damaged), content[:at], content[:at] + bytes(len(content) - at)):
            (tmp_path / "whole").write_bytes(content)
            run = StoredRun.open(tmp_path / "whole")
            assert run.find(*keys.key_words(column(range(1600)))).found.sum() == 1500
            (tmp_path / "whole").write_bytes(text)
            try:
                hits = run.find(*keys.key_words(column(range(1600))))
                assert hits.found.tolist() == [n < 1500 for n in range(1600)] and hits.payload.tolist() == list(range(1500))
            except DamagedKeys:
                refused += 1
    assert refused > 590, "all but those that changed nothing"


def test_files_that_changed_places_are_not_opened(tmp_path: Path) -> None:
    """The list says which rows of which file were freed: under another name they are other keys."""
    folder = KeyFolder(tmp_path / "keys")
    index = KeyIndex(folder, flush_rows=4, run_rows=8)
    for first in (0, 4):
        index.add(column(range(first, first + 4)), np.arange(4), 1)
    index.discard(column([2]))
    index.keep("table", 0, 1, "attempt")
    listed, (one, two) = folder.load(), (tmp_path / "keys").glob("*.keys")
    assert listed is not None
    one.rename(tmp_path / "other")
    two.rename(one)
    (tmp_path / "other").rename(two)
    with pytest.raises(DamagedKeys):
        folder.open(listed)


def decide(store: DeltaStore, number: int, some: Any) -> None:
    """One decision that reserves these."""
    with store.begin(kit.NAME, number) as transaction:
        asked = pa.table([column(some), pa.array(list(some), pa.int64())], schema=KEYS)
        transaction.ask(asked["key"])
        transaction.reserve(asked)
        transaction.execute(Commit())


def known(store: DeltaStore, most: int = 100) -> list[int]:
    """Which of these the store knows now."""
    with store._states.caught_up(kit.NAME) as state:
        return np.flatnonzero(state.probe(column(range(most)))[0]).tolist()


def filled(folder: Path, decisions: int = 9, **options: Any) -> DeltaStore:
    """A store with five keys of each decision."""
    store = open_store(folder, **options)
    number = take_epoch(store, kit.NAME, "filling", 1.0, force=True).epoch
    for first in range(0, 5 * decisions, 5):
        decide(store, number, range(first, first + 5))
    assert known(store) == list(range(5 * decisions)) and wrong(store) == []
    return store


def wrong(store: DeltaStore) -> list[str]:
    """What `problems` says of keys; these decisions have no batch records."""
    return [told for told in store.problems(kit.NAME) if "reserved keys" in told or "more than once" in told]


def key_tables(folder: Path) -> list[Path]:
    """The ledger's files with reservations, the oldest first."""
    files = (folder / "state" / "ledger").rglob("*.parquet")
    return sorted((p for p in files if "reservation" in pq.read_table(p)["kind"].to_pylist()), key=lambda p: p.stat().st_mtime_ns)


def list_of(folder: Path) -> Path:
    """The list of the consumer's files."""
    return folder / "state" / "keys" / kit.NAME / key_files.LIST


def test_a_start_opens_files_and_reads_no_reservation(folder: Path) -> None:
    """What files have is not read from the ledger: a start succeeds while its old files of reservations are away, and knows every key."""
    filled(folder)
    for path in key_tables(folder):
        path.rename(path.with_suffix(".away"))
    started = open_store(folder)
    assert started.reserved(kit.NAME) == 45 and known(started) == list(range(45))


def test_who_asks_for_no_key_reads_none(folder: Path) -> None:
    """Commands that show the state, letters or messages cost nothing for each key, with files of keys and without."""
    filled(folder)
    shutil.rmtree(list_of(folder).parent)
    away = [path.rename(path.with_suffix(".away")) for path in key_tables(folder)]
    store = open_store(folder)
    assert store.head(kit.NAME).seq == 10 and store.letters(Selection()).num_rows == 0 and store.publish(kit.NAME) == 0
    assert store.batches(kit.NAME).num_rows == 0 and store.outbox(kit.NAME).topics() == []
    with pytest.raises(StoreUnavailable):
        store.reserved(kit.NAME)
    for path in away:
        path.rename(path.with_suffix(".parquet"))
    assert store.reserved(kit.NAME) == 45


def test_a_start_reads_what_came_after_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of later decisions come from the ledger, and keys that were freed since stay free."""
    store = filled(folder)
    monkeypatch.setattr(keys, "FLUSH_ROWS", 10**6)
    other = open_store(folder)
    number = take_epoch(other, kit.NAME, "again", 1.0, force=True).epoch
    decide(other, number, range(50, 60))
    for path in key_tables(folder)[:-1]:
        path.rename(path.with_suffix(".away"))
    assert known(open_store(folder)) == [*range(45), *range(50, 60)]
    store.close()


@pytest.mark.parametrize("second", [129, HELD])
@pytest.mark.parametrize("flush_rows", [1, 100])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_key_that_is_reserved_again_outlives_its_purged_day(tmp_path: Path, second: int, flush_rows: int, at_once: bool) -> None:
    """Rows that a purge has not dropped yet stand beside newer ones of the same key: the next purge takes the old ones alone."""
    index = KeyIndex(KeyFolder(tmp_path), flush_rows=flush_rows, run_rows=24)
    index.forget_before(100)
    for numbers, days in [([1, 2, 1], [50, 50, second])] if at_once else [([1, 2], [50, 50]), ([1], [second])]:
        index.add(column(numbers), np.array(numbers), np.array(days))
    assert len(index) == 2
    index.forget_before(101)
    known, _, held = index.probe(column([1, 2]))
    assert known.tolist() == [True, False] and held[0] == (second == HELD) and len(index) == 1


def test_no_key_is_unknown_after_a_look_that_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is away while its tables are compared, before the first question: neither this batch nor the next one takes known keys
    for new ones.
    """
    monkeypatch.setattr(keys, "FLUSH_ROWS", 10**6)
    one = open_store(folder)
    kit.process(one, take_epoch(one, kit.NAME, "one", 1.0, force=True).epoch, kit.events([1, 2, 3]))
    number = take_epoch(one, kit.NAME, "again", 1.0, force=True).epoch
    two, told = open_store(folder), ConsumerState.require_sound

    def fails_once(state: ConsumerState) -> None:
        monkeypatch.setattr(ConsumerState, "require_sound", told)
        kit.process(one, number, kit.events([4], 3), 1)
        with monkeypatch.context() as away:
            away.setattr(Ledger, "open", unavailable)
            told(state)

    monkeypatch.setattr(ConsumerState, "require_sound", fails_once)
    with pytest.raises(StoreUnavailable):
        kit.process(two, number, kit.events([1, 2, 3, 5], 10), 2)
    assert kit.process(two, number, kit.events([1, 2, 3, 5], 10), 2).written == [5]


def unavailable(ledger: Ledger) -> None:
    """What `Ledger.open` does where the storage is away."""
    raise StoreUnavailable("away")


def test_a_check_beside_a_running_consumer_finds_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions that are made while `verify` reads are no contradiction, and do not end it."""
    one = filled(folder, 2)
    number = take_epoch(one, kit.NAME, "again", 1.0, force=True).epoch
    meanwhile = iter(range(10, 100))

    def damage(state: ConsumerState) -> None:
        decide(one, number, [next(meanwhile)])

    monkeypatch.setattr(ConsumerState, "damage", property(damage))
    two = open_store(folder)
    assert wrong(two) == wrong(two) == [] and two.reserved(kit.NAME) == one.reserved(kit.NAME) > 10


@pytest.mark.parametrize("what", ["lost list", "damaged list", "lost file", "damaged file", "empty file", "foreign list", "other format"])
def test_files_that_are_not_right_are_made_again(folder: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """The ledger alone counts: a start knows every key whatever became of the files, says so, and the next one opens new files."""
    filled(folder)
    listed = list_of(folder)
    told = KeyFolder(listed.parent).load()
    assert told is not None
    some = listed.parent / next(iter(told.files))
    if what == "lost list":
        listed.unlink()
    elif what == "damaged list":
        listed.write_bytes(listed.read_bytes()[:-1] + b" ")
    elif what == "lost file":
        some.unlink()
    elif what == "damaged file":
        some.write_bytes(bytes(100) + some.read_bytes()[100:])
    elif what == "empty file":
        some.write_bytes(b"")
    elif what == "foreign list":
        filled(folder / "other", 3)
        shutil.rmtree(listed.parent)
        shutil.copytree(list_of(folder / "other").parent, listed.parent)
    else:
        text = listed.read_bytes().split(b"\n", 1)[1].replace(b'"format": 1', b'"format": 2')
        listed.write_bytes(b"%08x\n%s" % (key_files.zlib.crc32(text), text))
    started = open_store(folder)
    assert known(started) == list(range(45)) and wrong(started) == []
    assert ("the keys are read from the ledger" in caplog.text) == (what != "lost list"), "without a list it is as at the first start"
    for path in key_tables(folder):
        path.rename(path.with_suffix(".away"))
    assert known(open_store(folder)) == list(range(45)), "the files were made again"


def spoil(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files of keys, which are open: other bytes, a part is missing, or they cannot be read any more."""
    paths = list(list_of(folder).parent.glob("*.keys"))
    gone, read = {path.stat().st_ino for path in paths}, os.pread

    def stale(number: int, size: int, at: int) -> bytes:
        if os.fstat(number).st_ino in gone:
            raise OSError(116, "Stale file handle")
        return read(number, size, at)

    for path in paths:
        if how == "shortened":
            os.truncate(path, 100)
        elif how == "other bytes":
            with path.open("r+b") as file:
                file.write(bytes(200))
    if how == "unreadable":
        monkeypatch.setattr(os, "pread", stale)


HOW = pytest.mark.parametrize("how", ["other bytes", "shortened", "unreadable"])


@HOW
@pytest.mark.parametrize("used", [False, True])
def test_a_file_that_is_damaged_while_it_is_open_is_made_again(
    folder: Path, how: str, used: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first use of a page and after it: the probe that meets the damage answers from the ledger, and says so."""
    filled(folder)
    started = open_store(folder)
    assert started.reserved(kit.NAME) == 45 and (not used or known(started) == list(range(45)))
    spoil(folder, how, monkeypatch)
    assert known(started) == list(range(45))
    assert "cannot be used, so the keys are read from the ledger" in caplog.text


@HOW
def test_decisions_after_damage_know_every_key(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running process that takes in its own decisions meets the damage there: no key is lost, none is reserved twice."""
    store = filled(folder)
    number = take_epoch(store, kit.NAME, "again", 1.0, force=True).epoch
    for first in range(45, 75, 5):
        spoil(folder, how, monkeypatch)
        with store.begin(kit.NAME, number) as transaction:
            some = pa.table([column(range(first - 5, first + 5)), pa.array(range(10), pa.int64())], schema=KEYS)
            transaction.ask(some["key"])
            assert transaction.reserve(some).num_rows == 5
            transaction.execute(Commit())
    assert known(store) == known(open_store(folder)) == list(range(75)) and wrong(store) == []


@HOW
def test_a_count_never_rests_on_damaged_pages(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a purge a count asks the pages for the days of freed keys: where they are damaged, it comes from the ledger."""
    store = filled(folder, 2)
    store.purge(kit.NAME, tomorrow() - dt.timedelta(days=1), by="ann", reason="", although_behind=True)
    assert store.reserved(kit.NAME) == 10
    with store._states.caught_up(kit.NAME) as state:
        state.keys._index.discard(column([3]))  # as one that was freed; the ledger has it
        assert state.reserved() == 9
        spoil(folder, how, monkeypatch)
        assert state.reserved() == 10


def test_a_list_that_another_process_replaces_meanwhile_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that finds files of its list gone opens those of the newer list, and does not read all keys from the ledger."""
    store, seen, load = filled(folder, 2), list[key_files.KeyList | None](), KeyFolder.load
    seen.append(KeyFolder(list_of(folder).parent).load())
    number = take_epoch(store, kit.NAME, "again", 1.0, force=True).epoch
    for first in range(10, 60, 5):
        decide(store, number, range(first, first + 5))
    assert seen[0] is not None and not all((list_of(folder).parent / name).exists() for name in seen[0].files)
    for path in key_tables(folder):
        path.rename(path.with_suffix(".away"))
    monkeypatch.setattr(KeyFolder, "load", lambda folder: seen.pop() if seen else load(folder))
    started = open_store(folder)
    assert known(started) == list(range(60)) and not seen and list_of(folder).exists()


def test_files_of_a_history_that_was_taken_back_are_not_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older ledger beside newer files: keys of decisions that it does not have are not known."""
    filled(folder, 4)
    shutil.copytree(folder / "state" / "ledger", folder / "copied")
    store = open_store(folder)
    number = take_epoch(store, kit.NAME, "more", 1.0, force=True).epoch
    for first in range(50, 90, 5):
        decide(store, number, range(first, first + 5))
    shutil.rmtree(folder / "state" / "ledger")
    (folder / "copied").rename(folder / "state" / "ledger")
    monkeypatch.setattr(keys, "FLUSH_ROWS", 10**6)
    older = open_store(folder)
    assert known(older) == list(range(20))
    number = take_epoch(older, kit.NAME, "other", 1.0, force=True).epoch
    for one in range(90, 100):
        decide(older, number, [one])
        assert known(open_store(folder)) == [*range(20), *range(90, one + 1)]


def test_a_store_can_keep_its_files_elsewhere(folder: Path, tmp_path: Path) -> None:
    """Files are where `keys_folder` says, for instance on this machine beside a store on object storage."""
    filled(folder, keys_folder=tmp_path / "mine")
    assert (tmp_path / "mine" / kit.NAME / key_files.LIST).exists() and not list_of(folder).exists()


def test_a_folder_that_cannot_be_used_costs_a_warning(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files without names take their place, and the log says once what the next start costs."""
    (tmp_path / "file").write_text("no folder")
    filled(folder, keys_folder=tmp_path / "file")
    assert caplog.text.count("The next start reads all keys from the ledger") == 1
    assert known(open_store(folder, keys_folder=tmp_path / "file")) == list(range(45))


def test_a_list_never_leaves_out_keys_that_no_file_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no file can be written, no list says that what is in memory is in files."""
    folder = KeyFolder(tmp_path / "keys")
    index = KeyIndex(folder, **TINY)
    index.add(column(range(8)), np.arange(8), 1)
    index.keep("table", 0, 1, "first")
    index.add(column(range(8, 10)), np.arange(2), 1)
    monkeypatch.setattr(KeyFolder, "new", full_disk)
    index._listed = set()  # as after a purge: a new list is due
    index.keep("table", 0, 2, "second")
    listed = folder.load()
    assert listed is not None and listed.seq == 1 and index.probe(column(range(10)))[0].all()


def full_disk(folder: object, capacity: int) -> NewFile:
    """What `KeyFolder.new` and `NewFile` do where there is no room."""
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("broken", ["no folder", "no room"])
def test_small_decisions_write_no_file_each_while_the_folder_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    """What cannot be listed waits until there is enough for a file: no decision tries, or logs, for itself."""
    tried: list[int] = []
    new = KeyFolder.new
    monkeypatch.setattr(KeyFolder, "new", lambda folder, capacity: (tried.append(capacity), new(folder, capacity))[1])
    if broken == "no folder":
        (tmp_path / "keys").write_text("a file")
    else:
        monkeypatch.setattr(key_files, "NewFile", full_disk)
    index = KeyIndex(KeyFolder(tmp_path / "keys"), flush_rows=10)
    index._listed = {tmp_path / "purged"}
    for number in range(30):
        index.add(column([number]), np.array([number]), 1)
        index.keep("table", 0, number, "attempt")
    assert len(tried) < 10 and len(caplog.records) < 5 and index.probe(column(range(30)))[0].all()


def test_files_that_others_delete_meanwhile_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process renames its list between our look at the folder and our question how old it is: the folder stays in use."""
    folder, there = KeyFolder(tmp_path / "keys"), Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: iter([*there(path), path / f"{key_files.LIST}.renamed"]))
    index = KeyIndex(folder, **TINY)
    index.add(column(range(8)), np.arange(8), 1)
    index.keep("table", 0, 1, "attempt")
    assert folder.load() is not None and folder.usable


@pytest.mark.parametrize("call", ["exists", "unlink"])
def test_a_folder_that_fails_in_any_call_costs_no_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A share that is away answers even questions with an error: the index says that its files have to be made again, and no more."""
    index = KeyIndex(KeyFolder(tmp_path / "keys"), **TINY)
    index.add(column(range(16)), np.arange(16), 1)

    def stale(path: Path, **options: Any) -> bool:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, call, stale)
    with contextlib.suppress(DamagedKeys):
        index.keep("table", 0, 1, "attempt")
    index._joining = Joining(index._folder, index._stored, iter([]))
    index.forget_before(2)
    assert len(index) == 0


FULL = """
import logging, resource, signal, sys
import pyarrow as pa, numpy as np
from pathlib import Path
from dedup.delta.keys import Joining, KeyIndex
from dedup.delta.key_files import KeyFolder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
index = KeyIndex(KeyFolder(Path(sys.argv[1])), flush_rows=2000)
keys = [i.to_bytes(2, "big") * 8 for i in range(9000)]
for first in range(0, 9000, 500):
    index.add(pa.array(keys[first : first + 500], pa.binary(16)), np.arange(500), 1)
    index.keep("table", 0, first, "attempt")
assert index.probe(pa.array(keys, pa.binary(16)))[0].all() and len(index) == 9000
print("knows all of them;", len(list(Path(sys.argv[1]).iterdir())), "files")
"""


def test_a_full_disk_is_told_and_no_key_is_lost(tmp_path: Path) -> None:
    """A process that cannot write its files goes on with the keys in memory; no signal ends it, and no half file stays."""
    run = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "keys")], capture_output=True, text=True, env=environment(), check=False
    )
    assert (run.returncode, run.stdout) == (0, "knows all of them; 0 files\n"), run.stderr
    assert "known keys stay in memory, because no file can be written" in run.stderr


@pytest.mark.parametrize("before", ["tomorrow", "9999-12-31"])
def test_a_running_process_forgets_what_was_purged(folder: Path, before: str) -> None:
    """Also in files and while it runs; a key that a letter holds stays known."""
    store = filled(folder, 3)
    number = take_epoch(store, kit.NAME, "again", 1.0, force=True).epoch
    kit.process(store, number, kit.events([1, 2], 100), 1, reject=lambda one: one == 2)
    day = tomorrow() if before == "tomorrow" else dt.date.fromisoformat(before)
    store.purge(kit.NAME, day, by="ann", reason="", although_behind=True)
    for some in (store, open_store(folder)):
        assert known(some) == [] and some.reserved(kit.NAME) == 1
        with some._states.caught_up(kit.NAME) as state:
            assert state.held(pa.array([kit.key_bytes(2)], pa.binary(16))).all()
    decide(store, number, range(50, 53))
    assert known(store) == known(open_store(folder)) == [50, 51, 52] and wrong(store) == []


def test_a_key_that_comes_again_after_a_purge_that_died_is_no_contradiction(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The purge is decided and its rows are still there: the key counts as new, and `verify` does not call it reserved twice."""
    store = filled(folder, 2)
    monkeypatch.setattr(Ledger, "drop_reservations", lambda ledger, before: None)
    store.purge(kit.NAME, dt.datetime.now(dt.UTC).date() + dt.timedelta(days=1), by="ann", reason="", although_behind=True)
    number = take_epoch(store, kit.NAME, "again", 1.0, force=True).epoch
    assert known(store) == []
    decide(store, number, range(3))
    assert known(store) == [0, 1, 2] and wrong(store) == []


@pytest.mark.parametrize("files", [True, False])
def test_all_processes_forget_the_same_keys_in_a_purge_that_is_not_done(folder: Path, monkeypatch: pytest.MonkeyPatch, files: bool) -> None:
    """The purge is decided and its rows are still there: who starts then knows what a running process knows, and so does a second one
    that sees the purge and later reservations at once. Those of its own day that came later count.
    """
    one = filled(folder, 2)
    two = open_store(folder)
    assert known(two) == list(range(10))
    number = take_epoch(one, kit.NAME, "again", 1.0, force=True).epoch
    decide(one, number, range(20, 25))
    monkeypatch.setattr(Ledger, "drop_reservations", lambda ledger, before: None)
    one.purge(kit.NAME, tomorrow(), by="ann", reason="", although_behind=True)
    decide(one, number, [*range(3), *range(30, 35)])
    if not files:
        shutil.rmtree(list_of(folder).parent)
    for some in (one, two, open_store(folder)):
        assert known(some) == [*range(3), *range(30, 35)] and some.reserved(kit.NAME) == 8 and wrong(some) == []
    one.purge(kit.NAME, tomorrow() + dt.timedelta(days=1), by="ann", reason="", although_behind=True)
    assert known(one) == known(two) == known(open_store(folder)) == []


def tomorrow() -> dt.date:
    """In UTC."""
    return (dt.datetime.now(dt.UTC) + dt.timedelta(days=1)).date()


CHILD = """
import sys, pyarrow as pa
from pathlib import Path
from dedup.delta import keys
sys.path[:0] = [sys.argv[2]]
keys.FLUSH_ROWS, keys.RUN_ROWS, keys.SLICE_ROWS, keys.MOST_SMALL = 4, 24, 5, 3
from stores.delta import test_key_files as t
from kit import delta_kit as kit
from kit.delta_kit import open_store
from checkpoint.holders import take_epoch
store = open_store(Path(sys.argv[1]))
number = take_epoch(store, kit.NAME, "child", 1.0, force=True).epoch
first = max(t.known(store, 5000), default=-1) + 1
assert t.known(store, 5000) == list(range(first)), "keys are missing"
for at in range(first, 5000, 3):
    t.decide(store, number, range(at, at + 3))
    print(at + 3, flush=True)
"""


def test_kills_at_any_time_lose_no_key_and_no_start_is_misled(folder: Path) -> None:
    """kill -9 while files are written, joined, listed and deleted: each start knows every key of every decision."""
    dice, reached = random.Random(5), 0
    open_store(folder)
    for _ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder), str(Path(__file__).parents[2])],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert child.stdout is not None
        line = child.stdout.readline()
        time.sleep(dice.random() * 1.5)
        os.kill(child.pid, signal.SIGKILL)
        told = [int(line), *map(int, child.stdout.read().split())]
        child.stdout.close()
        child.wait()
        assert told[0] >= reached
        reached = told[-1]
        found = known(open_store(folder), 5000)
        assert found == list(range(len(found))) and len(found) >= reached
        assert wrong(open_store(folder)) == []
    assert reached > 30


def test_two_processes_that_write_files_mislead_nobody(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each lists and deletes files of its own time; both, and whoever starts then, know every key."""
    one, two = filled(folder, 4), open_store(folder)
    number = take_epoch(one, kit.NAME, "one", 1.0, force=True).epoch
    for first in range(20, 95, 5):
        decide(one if first % 2 else two, number, range(first, first + 5))
        assert known(one) == known(two) == known(open_store(folder)) == list(range(first + 5))
    assert wrong(one) == wrong(two) == []
    assert all(record.levelno <= logging.WARNING for record in caplog.records)


def test_files_that_nobody_lists_are_deleted_after_a_day(folder: Path) -> None:
    """What a killed process left goes; what another process may just be writing stays."""
    store = filled(folder, 2)
    old, new = (list_of(folder).parent / f"{name}.keys" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half a file")
    long_ago = time.time() - key_files.ABANDONED - 60
    os.utime(old, (long_ago, long_ago))
    number = take_epoch(store, kit.NAME, "again", 1.0, force=True).epoch
    decide(store, number, range(50, 60))
    assert not old.exists() and new.exists()

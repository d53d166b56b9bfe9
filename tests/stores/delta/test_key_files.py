"""Files of keys: a start opens them in place of reading the ledger, and nothing that is wrong with them gives a wrong answer."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.errors import StoreUnavailable
from checkpoint.holders import take_epoch
from deadletter.selection import Selection
from dedup.delta import key_files, keys
from dedup.delta.key_files import HELD, DamagedKeys, KeyFolder, KeyRows, NewFile
from dedup.delta.keys import Joining, KeyIndex
from dedup.delta.ledger import Ledger
from dedup.delta.state import ConsumerState
from fixtures.variants import of_which
from kit import delta_kit as kit
from kit.delta_kit import open_store
from kit.key_kit import TINY, column, decide, filled, folder_of, key_tables, known, list_of, wrong
from kit.paths import environment

pytestmark = pytest.mark.delta


@pytest.fixture(autouse=True)
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few keys make files, and files are joined."""
    for name, value in (("FLUSH_ROWS", 4), ("RUN_ROWS", 24), ("SLICE_ROWS", 5), ("MOST_SMALL", 3)):
        monkeypatch.setattr(keys, name, value)


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


@settings(max_examples=300, deadline=None)
@given(st.lists(CHANGE, max_size=25), st.sampled_from([1, 3, 512]))
def test_an_index_that_is_opened_again_answers_like_a_dictionary(changes: list[tuple[str, list[int], int]], page_keys: int) -> None:
    """Keys come, are freed and purged, files of one page and of many are written, joined and opened, in any order."""
    with kit.pages_of(page_keys), key_files.tempfile.TemporaryDirectory() as folder:
        life = Life(Path(folder, "keys"))
        for what, numbers, day in changes:
            life.do(what, numbers, min(day, 5) if what == "purge" else day)
            life.check()


@pytest.mark.parametrize("gone", of_which(3, range(0, 40, 3)))
def test_a_key_that_is_freed_while_files_are_joined_stays_free(tmp_path: Path, gone: int) -> None:
    """Whichever key, and however far the new file is written: the joined file does not bring it back."""
    for flushes in range(6):
        index = KeyIndex(KeyFolder(tmp_path / str(flushes)), **TINY)
        for number in range(0, 12, 4):
            index.add(column(range(number, number + 4)), np.arange(4), 1)
        for first in range(12, 12 + 4 * flushes, 4):
            index.add(column(range(first, first + 4)), np.arange(4), 1)
        index.discard(column([gone]))
        for first in range(40, 80, 4):
            index.add(column(range(first, first + 4)), np.arange(4), 1)
        assert not index.probe(column([gone]))[0][0] and any(len(run) > 4 for run in index._stored)


def test_a_start_opens_files_and_reads_no_reservation(folder: Path) -> None:
    """What files have is not read from the ledger: a start succeeds while its old files of reservations are away, and knows every key."""
    filled(folder)
    for path in key_tables(folder):
        path.rename(path.with_suffix(".away"))
    started = open_store(folder)
    assert started.reserved(kit.NAME) == 45 and known(started) == list(range(45))


@pytest.mark.full
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


@pytest.mark.full
def test_a_store_can_keep_its_files_elsewhere(folder: Path, tmp_path: Path) -> None:
    """Files are where `keys_folder` says, for instance on this machine beside a store on object storage."""
    filled(folder, keys_folder=tmp_path / "mine")
    assert folder_of(tmp_path / "mine").joinpath(key_files.LIST).exists() and not list_of(folder).exists()


@pytest.mark.full
def test_stores_that_share_a_folder_for_files_do_not_disturb_each_other(folder: Path, tmp_path: Path) -> None:
    """Their consumers have one name: each store opens its own files, and a deletion in one leaves those of the other."""
    there, both = tmp_path / "mine", [folder, tmp_path / "other"]
    one, two = (filled(place, keys_folder=there) for place in both)
    assert len(list(there.iterdir())) == 2
    tables = key_tables(both[1])
    one.delete_consumer(kit.NAME, by="ann", reason="gone", although_running=True)
    two.close()
    for path in tables[:-1]:
        path.unlink()  # a start that reads the ledger in place of the files would miss them
    assert known(open_store(both[1], keys_folder=there)) == list(range(45)) and len(list(there.iterdir())) == 1


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


def full_disk(folder: object, capacity: int, name: str | None = None) -> NewFile:
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
    index._listed = {"purged"}
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


CHILD = """
import sys, pyarrow as pa
from pathlib import Path
from dedup.delta import keys
sys.path[:0] = [sys.argv[2]]
keys.FLUSH_ROWS, keys.RUN_ROWS, keys.SLICE_ROWS, keys.MOST_SMALL = 4, 24, 5, 3
from kit import key_kit as t
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


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.full)])
def test_kills_at_any_time_lose_no_key_and_no_start_is_misled(folder: Path, kills: int) -> None:
    """kill -9 while files are written, joined, listed and deleted: each start knows every key of every decision."""
    dice, reached = random.Random(5), 0
    open_store(folder)
    for _ in range(kills):
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
    assert reached > 5 * kills


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


def test_a_file_that_is_being_written_keeps_no_slice_in_memory() -> None:
    """Of what is written a file keeps its filter, and one key and the checksum of each page: sixteen million keys are 270 MB."""
    file, gone = NewFile(None, 4_096), []
    for first in (0, 1_024, 2_048):
        numbers = np.arange(first, first + 1_024, dtype=np.uint64)
        gone.append(weakref.ref(numbers))
        file.add(KeyRows(numbers, numbers, numbers.astype(np.int64), numbers.astype(np.uint16)))
        del numbers
    assert [ref() is None for ref in gone[:2]] == [True, True]
    file.abandon()

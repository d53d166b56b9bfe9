"""Files of keys that are damaged, lost, or of another history: before and while they are open, no answer comes from them."""

from __future__ import annotations

import datetime as dt
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from checkpoint.holders import take_epoch
from deadletter.store import KEYS, Commit
from dedup.delta import key_files, keys
from dedup.delta.key_files import DamagedKeys, KeyFolder, KeyRows, NewFile, StoredRun
from dedup.delta.keys import KeyIndex
from fixtures.variants import of_which
from kit import delta_kit as kit
from kit.delta_kit import open_store
from kit.key_kit import column, decide, filled, key, key_tables, known, list_of, tomorrow, wrong

pytestmark = pytest.mark.delta


@pytest.fixture(autouse=True)
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few keys make files, and files are joined."""
    for name, value in (("FLUSH_ROWS", 4), ("RUN_ROWS", 24), ("SLICE_ROWS", 5), ("MOST_SMALL", 3)):
        monkeypatch.setattr(keys, name, value)


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
    content, dice, refused, asked = (tmp_path / "whole").read_bytes(), random.Random(2), 0, keys.key_words(column(range(1600)))
    for at in dice.sample(range(3 * key_files.PAGE.itemsize), 200):
        damaged = bytearray(content)
        damaged[at] ^= 1 << dice.randrange(8)
        for text in (bytes(damaged), content[:at], content[:at] + bytes(len(content) - at)):
            (tmp_path / "whole").write_bytes(content)
            run = StoredRun.open(tmp_path / "whole")
            assert run.find(*asked).found.sum() == 1500
            (tmp_path / "whole").write_bytes(text)
            try:
                hits = run.find(*asked)
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


@pytest.mark.parametrize(
    "what", of_which(1, ["damaged file", "lost list", "foreign list", "other format", "damaged list", "lost file", "empty file"])
)
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


HOW = pytest.mark.parametrize("how", of_which(1, ["unreadable", "other bytes", "shortened"]))


@HOW
@pytest.mark.parametrize("used", of_which(1, [True, False]))
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


@pytest.mark.full
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


@pytest.mark.parametrize("how", of_which(1, ["other bytes", "shortened", "unreadable"]))
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

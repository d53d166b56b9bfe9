"""Copies of files of keys beside the ledger: a start on a new machine fetches them, nothing wrong with them gives a wrong answer, and no
batch waits for them.

Here the object storage is a folder; test_key_copies_objects.py has a real one.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint.holders import take_epoch
from dedup.delta import DeltaStore, consumers, key_objects, keys, objects
from dedup.delta.key_files import ABANDONED
from dedup.delta.key_objects import LATE, OTHERS, ListName
from fixtures.variants import of_which
from kit import delta_kit as kit
from kit.delta_kit import open_store
from kit.key_kit import copied, copies_of, decide, filled, folder_of, known, list_of, noted_reads, tomorrow, wrong

pytestmark = pytest.mark.delta


@pytest.fixture(autouse=True)
def few_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A few keys make files of a few parts, and files are joined; a store in a folder is taken for one on object storage."""
    for name, value in (("FLUSH_ROWS", 4), ("RUN_ROWS", 24), ("SLICE_ROWS", 5), ("MOST_SMALL", 3)):
        monkeypatch.setattr(keys, name, value)
    monkeypatch.setattr(key_objects, "PART", 5000)
    monkeypatch.setattr(consumers, "by_objects", lambda uri, options: True)
    monkeypatch.setattr(consumers, "is_local", lambda uri: False)
    yield
    key_objects.finish()


@pytest.fixture
def there(folder: Path) -> Path:
    """Where the copies are."""
    made = folder / "state" / "keys" / kit.NAME
    made.mkdir(parents=True)
    return made


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The last decision of each file of reservations that is read from the ledger."""
    return noted_reads(monkeypatch)


def lists(there: Path) -> list[ListName]:
    """The newest first."""
    return key_objects._lists([f"lists/{path.name}" for path in (there / "lists").glob("*")])


def files(there: Path) -> set[str]:
    """Names of files that are there, in part or whole."""
    return {path.name for path in there.glob("*.keys") if any(path.iterdir())}


def more(store: DeltaStore, numbers: range) -> None:
    """A decision for each five of these."""
    epoch = take_epoch(store, kit.NAME, "more", 1.0, force=True).epoch
    for first in range(numbers.start, numbers.stop, 5):
        decide(store, epoch, range(first, first + 5))


def aged(path: Path, seconds: float) -> None:
    """It was written so long ago."""
    at = time.time() - seconds
    for one in [path, *path.rglob("*")]:
        os.utime(one, (at, at))


@pytest.mark.full
@pytest.mark.parametrize("own", [False, True])
def test_a_start_on_a_new_machine_reads_only_what_came_after_the_copies(
    folder: Path, there: Path, tmp_path: Path, reads: list[int], own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its folder or in none it fetches the files, opens them, and reads one file of reservations of the ledger: the new one."""
    copied(filled(folder))
    monkeypatch.setattr(keys, "FLUSH_ROWS", 10**6)
    more(open_store(folder), range(50, 55))
    last = lists(there)[0].seq
    reads.clear()
    options = {"keys_folder": tmp_path / "machine"} if own else {}
    started = open_store(folder, **options)
    assert started.reserved(kit.NAME) == 50 and known(started) == [*range(45), *range(50, 55)]
    assert len(set(reads)) == 1 and min(reads) > last and wrong(started) == []
    if own:
        shutil.rmtree(there)  # what it has fetched is opened from now on
        reads.clear()
        assert known(open_store(folder, **options)) == [*range(45), *range(50, 55)] and min(reads) > last


@pytest.mark.full
def test_a_folder_that_is_far_behind_is_brought_up_by_the_copies(folder: Path, there: Path, tmp_path: Path, reads: list[int]) -> None:
    """A machine that had the consumer long ago opens its own files and those that others have copied since, each once."""
    options = {"keys_folder": tmp_path / "machine"}
    old = copied(filled(folder, 4, **options))
    old.close()
    new = open_store(folder)
    more(new, range(20, 60))
    copied(new)
    reads.clear()
    assert known(open_store(folder, **options)) == list(range(60)) and all(last > lists(there)[0].seq for last in reads)


@pytest.mark.full
@pytest.mark.parametrize("what", of_which(1, ["damaged end", "lost part", "damaged list"]))
def test_a_folder_that_is_far_behind_stays_in_use_where_the_copies_are_damaged(
    folder: Path, there: Path, tmp_path: Path, reads: list[int], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The machine opens its own files, says what is wrong with the others, and reads from the ledger what came after its own."""
    options = {"keys_folder": tmp_path / "machine"}
    old = copied(filled(folder, 4, **options))
    mine, last = {path.name for path in (tmp_path / "machine").rglob("*.keys")}, lists(there)[0].seq
    new = open_store(folder)
    more(new, range(20, 60))
    newest = there / lists(_and_copied(new, there))[0].path
    named = key_objects.decoded(newest.read_bytes())["files"].keys() - mine
    DAMAGES[what](there, newest, sorted(path for name in named for path in (there / name).iterdir()))
    caplog.clear()
    reads.clear()
    assert known(open_store(folder, **options)) == list(range(60)) and "cannot be used" in caplog.text
    assert min(reads) > last and old.reserved(kit.NAME) == 60


@pytest.mark.full
def test_a_start_without_copies_asks_once(folder: Path, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One list request; and no request at all where a decision writes no file, or a start has the files in its folder."""
    asked = list[str]()
    for name in ("listed", "get", "put", "delete"):
        real = getattr(objects, name)
        monkeypatch.setattr(
            key_objects.objects, name, lambda uri, *args, name=name, real=real: (_asked(asked, uri, name, there), real(uri, *args))[1]
        )
    monkeypatch.setattr(keys, "FLUSH_ROWS", 10**6)
    store = filled(folder)
    assert asked == ["listed"]
    more(store, range(50, 60))
    assert asked == ["listed"]
    monkeypatch.setattr(keys, "FLUSH_ROWS", 4)
    more(copied(open_store(folder, keys_folder=tmp_path / "machine")), range(60, 70))
    key_objects.finish()
    asked.clear()
    assert known(open_store(folder, keys_folder=tmp_path / "machine")) == [*range(45), *range(50, 70)] and asked == []


def _asked(asked: list[str], uri: str, name: str, there: Path) -> None:
    if uri == str(there):
        asked.append(name)


def lose_all(there: Path, newest: Path, parts: list[Path]) -> None:
    """As if nobody had copied anything."""
    shutil.rmtree(there)
    there.mkdir()


def change_places(there: Path, newest: Path, parts: list[Path]) -> None:
    """Two files have each other's name."""
    first, last = sorted({path.parent for path in parts})[:2]
    first.rename(there / "other")
    last.rename(first)
    (there / "other").rename(last)


def lead_elsewhere(there: Path, newest: Path, parts: list[Path]) -> None:
    """The list names a file outside the folder."""
    text = newest.read_bytes().split(b"\n", 1)[1].replace(parts[0].parent.name.encode(), b"../../somewhere.keys")
    newest.write_bytes(b"%08x\n%s" % (zlib.crc32(text), text))


def be_foreign(there: Path, newest: Path, parts: list[Path]) -> None:
    """They are the copies of another ledger."""
    lose_all(there, newest, parts)
    other = there.parents[2] / "other" / "state" / "keys" / kit.NAME
    other.mkdir(parents=True)
    copied(filled(there.parents[2] / "other"))
    shutil.copytree(other, there, dirs_exist_ok=True)


DAMAGES: dict[str, Callable[[Path, Path, list[Path]], object]] = {
    "damaged list": lambda there, newest, parts: newest.write_bytes(newest.read_bytes()[:-1] + b" "),
    "all lost": lose_all,
    "half a list": lambda there, newest, parts: newest.write_bytes(newest.read_bytes()[:50]),
    "lost part": lambda there, newest, parts: parts[-1].unlink(),
    "short part": lambda there, newest, parts: os.truncate(parts[0], 100),
    "damaged page": lambda there, newest, parts: parts[0].write_bytes(bytes(200) + parts[0].read_bytes()[200:]),
    "damaged end": lambda there, newest, parts: parts[-1].write_bytes(parts[-1].read_bytes()[:-50] + bytes(50)),
    "files that changed places": change_places,
    "names that lead elsewhere": lead_elsewhere,
    "of another ledger": be_foreign,
}


@pytest.mark.parametrize("own", of_which(1, [False, True]))
@pytest.mark.parametrize("what", of_which(1, DAMAGES))
def test_copies_that_are_not_right_are_not_used(
    folder: Path, there: Path, tmp_path: Path, what: str, own: bool, caplog: pytest.LogCaptureFixture, reads: list[int]
) -> None:
    """A start knows every key whatever became of them, and says so; the next machine fetches what this one has copied."""
    copied(filled(folder))
    newest = there / lists(there)[0].path
    DAMAGES[what](there, newest, sorted(path for path in there.glob("*.keys/*") if path.parent.name in newest.read_text()))
    caplog.clear()
    started = open_store(folder, **({"keys_folder": tmp_path / "machine"} if own else {}))
    assert known(started) == list(range(45)) and wrong(started) == []
    assert ("the keys are read from the ledger" in caplog.text) == (what != "all lost"), "without copies it is as at the first start"
    copied(started)
    reads.clear()
    assert known(open_store(folder)) == list(range(45)) and reads == [], "they were made again"


def test_damaged_copies_are_fetched_once(
    folder: Path, there: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process that meets the damage reads the ledger and fetches nothing again; it deletes the list, so that no other one meets it."""
    copied(filled(folder))
    for name in lists(there)[1:]:
        (there / name.path).unlink()
    DAMAGES["damaged page"](there, there / lists(there)[0].path, sorted(there.glob("*.keys/*")))
    monkeypatch.setattr(keys, "FLUSH_ROWS", 10**6)  # nobody makes them again
    with monkeypatch.context() as busy:
        waiting = list[Callable[[], None]]()
        busy.setattr(key_objects.Aside, "do", lambda aside, kind, work: waiting.append(work))
        assert known(open_store(folder)) == list(range(45)) and "page 0 is not as it was written" in caplog.text
    for work in waiting:
        work()
    caplog.clear()
    assert known(open_store(folder)) == list(range(45)) and caplog.text == ""


def test_copies_of_a_history_that_was_taken_back_are_not_used(folder: Path, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older ledger beside newer copies: keys of decisions that it does not have are not known, also once it has as many decisions."""
    copied(filled(folder, 4))
    shutil.copytree(folder / "state" / "ledger", folder / "copied")
    store = open_store(folder)
    more(store, range(50, 90))
    copied(store)
    shutil.rmtree(folder / "state" / "ledger")
    (folder / "copied").rename(folder / "state" / "ledger")
    monkeypatch.setattr(keys, "FLUSH_ROWS", 10**6)  # no newer copies hide the others
    older, newest = open_store(folder), lists(there)[0].seq
    assert known(older) == list(range(20))
    for first in range(90, 140, 5):
        more(older, range(first, first + 5))
        assert known(open_store(folder), 200) == [*range(20), *range(90, first + 5)]
    assert older.head(kit.NAME).seq > newest
    monkeypatch.setattr(keys, "FLUSH_ROWS", 4)
    more(older, range(140, 150))
    assert known(copied(older), 200) == known(open_store(folder), 200) == [*range(20), *range(90, 150)]


@pytest.mark.full
def test_an_older_list_never_replaces_a_newer_one(folder: Path, there: Path, reads: list[int]) -> None:
    """A process that comes late with its list, after a process that took over: the later decision's list counts."""
    slow = filled(folder, 4)
    copied(slow)
    with slow._states.caught_up(kit.NAME) as state:
        late = state.keys._index.keep("", 0, 0, "")
        state.keys._index._listed = set()
        look = state._look_again()
        late = state.keys._index.keep(look.table_id, look.header.keyspace_since, look.header.seq, look.header.attempt)
    assert late is not None
    new = open_store(folder)
    more(new, range(20, 60))
    newest = lists(_and_copied(new, there))[0]
    copies_of(slow)._met = None  # it takes what is there for its own
    copies_of(slow).offer(late)
    copied(slow)
    assert lists(there)[0] == newest and newest.seq > late.listed.seq
    reads.clear()
    assert known(open_store(folder)) == list(range(60)) and all(last > newest.seq for last in reads)


def _and_copied(store: DeltaStore, there: Path) -> Path:
    copied(store)
    return there


@pytest.mark.full
def test_of_two_processes_one_copies(folder: Path, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has files of its own. Who finds a new list of the other leaves it to the other, until that has written none for an hour."""
    one = copied(filled(folder, 4))
    two = open_store(folder)
    more(two, range(20, 30))
    copied(two)
    of_two = lists(there)[0]
    for first in range(30, 60, 5):
        more(one, range(first, first + 5))
        copied(one)
        assert known(one) == list(range(first + 5)) and lists(there)[0] == of_two
    for name in reversed(lists(there)):
        aged(there / name.path, OTHERS + 60)
    more(one, range(60, 70))
    assert lists(_and_copied(one, there))[0] > of_two
    assert known(one) == known(two) == known(open_store(folder)) == list(range(70))


@pytest.mark.full
def test_files_that_lists_name_no_more_go_away(folder: Path, there: Path) -> None:
    """Joined files and old lists go with a new list, but for the list before it; `maintain` takes that, too, after an hour."""
    store = copied(filled(folder, 3))
    for first in range(15, 100, 5):
        more(store, range(first, first + 5))
        copied(store)
        assert len(lists(there)) == 2
        named = [key_objects.decoded((there / name.path).read_bytes())["files"] for name in lists(there)]
        assert files(there) == {*named[0], *named[1]}
    for name in reversed(lists(there)):
        aged(there / name.path, OTHERS + 60)
    store.maintain(kit.NAME)
    assert len(lists(there)) == 1 and files(there) == set(named[0])
    assert known(open_store(folder)) == list(range(100))


def test_what_a_killed_process_left_goes_after_a_day(folder: Path, there: Path) -> None:
    """Parts of files that no list names: old ones go, those that somebody may be writing stay."""
    store = copied(filled(folder, 3))
    for name in ("old", "new"):
        (there / f"{name}.keys").mkdir()
        (there / f"{name}.keys" / "00000").write_bytes(b"a part")
    aged(there / "old.keys", ABANDONED + 60)
    store.maintain(kit.NAME)
    assert {"old.keys", "new.keys"} & files(there) == {"new.keys"}
    assert known(open_store(folder)) == list(range(15))


@pytest.mark.full
def test_upkeep_beside_a_process_that_replaces_lists_deletes_no_file(folder: Path, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists that it saw are gone before it has read them: it does not take their files, which a newer list may name, for needless."""
    copied(filled(folder))
    before = files(there)
    for name in before:
        aged(there / name, ABANDONED + 60)
    with monkeypatch.context() as gone:
        gone.setattr(key_objects.objects, "get", lambda uri, options, path: None)
        open_store(folder).maintain(kit.NAME)
    assert before and files(there) == before


def test_purged_keys_leave_the_storage(folder: Path, there: Path) -> None:
    """A purge drops whole files: the next list does not name them, and upkeep deletes them, with the list before."""
    store = copied(filled(folder))
    before = files(there)
    store.purge(kit.NAME, tomorrow(), by="ann", reason="", although_behind=True)
    assert store.reserved(kit.NAME) == 0
    copied(store)
    for name in reversed(lists(there)):
        aged(there / name.path, OTHERS + 60)
    store.maintain(kit.NAME)
    assert before and files(there) == set() and known(open_store(folder)) == []


def failing(*args: Any) -> None:
    """What a request does while the storage refuses."""
    raise OSError("told by a test")


@pytest.mark.full
def test_a_failing_storage_costs_one_warning_and_no_batch(
    folder: Path, there: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reads: list[int]
) -> None:
    """Decisions go on, the log says it once, and with the next file everything is copied."""
    with monkeypatch.context() as away:
        away.setattr(key_objects.objects, "put", failing)
        store = copied(filled(folder))
    told = [record for record in caplog.records if "could not be written; they are tried again" in record.message]
    assert [record.levelno for record in told] == [logging.WARNING] and lists(there) == []
    more(store, range(45, 50))
    copied(store)
    reads.clear()
    assert known(open_store(folder)) == list(range(50)) and reads == []


@pytest.mark.parametrize("nth", of_which(3, [0, 5, 3, 1, 2, 4]))
def test_a_list_is_there_only_with_all_of_its_files(
    folder: Path, there: Path, monkeypatch: pytest.MonkeyPatch, nth: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever write is the last one: a start is not misled, and finds no list that names what is not there."""
    put, calls = objects.put, list[str]()

    def some(uri: str, options: Any, path: str, content: Any) -> None:
        calls.append(path)
        if len(calls) > nth:
            failing()
        put(uri, options, path, content)

    monkeypatch.setattr(key_objects.objects, "put", some)
    copied(filled(folder, 2))
    caplog.clear()
    assert known(open_store(folder)) == list(range(10)) and "cannot be used" not in caplog.text


def test_a_hanging_storage_holds_no_batch_and_closing_waits_a_while(folder: Path, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions go on while a copy hangs; the store is closed after the time that it waits."""
    go_on = threading.Event()
    monkeypatch.setattr(key_objects.objects, "put", lambda *args: go_on.wait(60))
    monkeypatch.setattr(consumers, "CLOSING", 0.3)
    began = time.monotonic()
    store = filled(folder)
    store.close()
    assert 0.3 < time.monotonic() - began < 30 and not go_on.is_set()
    go_on.set()


def test_a_copy_that_comes_half_a_day_late_is_given_up(folder: Path, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slept must not take its list for the newest."""
    store, offer = open_store(folder), list[Callable[[], None]]()
    monkeypatch.setattr(copies_of(store)._work, "do", lambda kind, work: offer.append(work))
    more(store, range(10))
    now = time.time
    monkeypatch.setattr(key_objects.time, "time", lambda: now() + LATE + 60)
    offer[-1]()
    assert lists(there) == []
    monkeypatch.setattr(key_objects.time, "time", now)
    put = objects.put

    def sleeps(*args: Any) -> None:
        put(*args)
        monkeypatch.setattr(key_objects.time, "time", lambda: now() + LATE + 60)

    monkeypatch.setattr(key_objects.objects, "put", sleeps)
    offer[-1]()
    assert lists(there) == [] and files(there), "it slept between the files and the list"


@pytest.mark.full
def test_files_that_a_killed_start_has_fetched_are_not_fetched_again(
    folder: Path, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are whole in the folder stay; only what is missing is asked for."""
    copied(filled(folder))
    machine, got, get = tmp_path / "machine", list[str](), objects.get
    monkeypatch.setattr(key_objects.objects, "get", lambda uri, options, path: (got.append(path), get(uri, options, path))[1])
    assert known(open_store(folder, keys_folder=machine)) == list(range(45))
    mine = folder_of(machine)
    names = {path.name for path in mine.glob("*.keys")}
    assert {path.partition("/")[0] for path in got} == {"lists", *names} and len(names) > 1
    (mine / "list").unlink()
    lost = sorted(names)[0]
    (mine / lost).unlink()
    got.clear()
    assert known(open_store(folder, keys_folder=machine)) == list(range(45))
    assert {path.partition("/")[0] for path in got} == {"lists", lost}


@pytest.mark.full
def test_a_full_disk_while_files_are_fetched_leaves_no_half_file(
    folder: Path, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The keys are read from the ledger then, and the log says why."""
    copied(filled(folder))
    caplog.clear()

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        disk.setattr(keys, "FLUSH_ROWS", 10**6)
        assert known(open_store(folder, keys_folder=tmp_path / "machine")) == list(range(45))
    assert "No space left" in caplog.text and list(folder_of(tmp_path / "machine").iterdir()) == []


@pytest.mark.full
def test_a_list_that_is_replaced_while_it_is_fetched_is_fetched_anew(
    folder: Path, there: Path, monkeypatch: pytest.MonkeyPatch, reads: list[int]
) -> None:
    """Another process deletes the list and its files between the look and the fetch: the newer list counts, not the ledger."""
    store, listed = copied(filled(folder, 4)), key_objects.KeyObjects.lists
    seen = [listed(copies_of(store))]
    for first in range(20, 60, 5):
        more(store, range(first, first + 5))
        copied(store)
    assert seen[0][0] not in lists(there)
    monkeypatch.setattr(key_objects.KeyObjects, "lists", lambda copies: seen.pop() if seen else listed(copies))
    reads.clear()
    started = open_store(folder)
    assert known(started) == list(range(60)) and not seen and all(last > lists(there)[0].seq for last in reads)
    assert not list_of(folder).exists()


def test_who_deletes_a_consumer_deletes_the_copies(folder: Path, there: Path) -> None:
    """Nothing of it is left on the storage, and a new consumer of that name knows none of its keys."""
    store = copied(filled(folder))
    assert files(there) and lists(there)
    store.delete_consumer(kit.NAME, by="ann", reason="gone", although_running=True)
    store.close()
    assert [path for path in there.rglob("*") if path.is_file()] == []
    again = filled(folder, keys_folder=str(folder / "other"))
    assert known(again) == list(range(45)) and wrong(again) == []
    again.close()

"""A sink that somebody restored: what lacks rows of ours is told, and what lacks only rows of others goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from checkpoint.errors import PublicationStuck
from dedup.delta import DeltaStore, restores, tables
from dedup.delta.restores import path_to
from fixtures.variants import of_which
from kit import delta_kit as kit
from kit.delta_kit import open_store, show

pytestmark = pytest.mark.delta


@pytest.fixture(autouse=True, params=of_which(1, ["by the log", "by files"]))
def look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How it is found out: behind many commits of others the files of the last publication are looked for first."""
    monkeypatch.setattr(restores, "MANY", 0 if request.param == "by files" else restores.MANY)
    return str(request.param)


def sink(folder: Path) -> DeltaTable:
    """The sink now."""
    return DeltaTable(str(folder / "orders"))


def foreign(folder: Path) -> None:
    """Somebody else appends a row."""
    write_deltalake(str(folder / "orders"), pa.table({"id": [-1], "text": ["foreign"]}, schema=kit.SINK), mode="append")


def process(store: DeltaStore, number: int, key: int) -> None:
    """One batch with one event."""
    kit.process(store, number, kit.events([key], key), key)


def assert_told(folder: Path, store: DeltaStore, number: int, what: str = "restored to an older version") -> None:
    """`problems`, a publication by a new process and the next batch say it, and nothing is written."""
    before = sink(folder).version()
    assert any("restored" in line for line in open_store(folder).problems(kit.NAME))
    with pytest.raises(PublicationStuck, match=what):
        process(store, number, 99)
    assert sink(folder).version() == before


@pytest.mark.parametrize("look", ["by the log", "by files"], indirect=True)
def test_a_sink_that_was_restored_is_told_and_accepted(folder: Path) -> None:
    """RESTORE takes published rows back and keeps transaction ids: noticed at the next write, and by `problems`."""
    store = open_store(folder)
    number = kit.epoch(store)
    for i in range(3):
        kit.process(store, number, kit.events([i], i), i)
    DeltaTable(str(folder / "orders")).restore(1)
    with pytest.raises(PublicationStuck, match="restored to an older version"):
        kit.process(store, number, kit.events([3], 3), 3)
    assert any("restored" in line for line in open_store(folder).problems(kit.NAME))
    store.accept_sink(kit.NAME, "orders", by="me", reason="meant")
    kit.process(store, number, kit.events([3], 3), 3)
    assert show(folder) == [0, 3] and store.problems(kit.NAME) == []


def test_a_restore_right_after_the_first_publication_is_told(folder: Path) -> None:
    """No header tells yet where the first publication is: a new process knows from the decision what the sink was before it."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    DeltaTable(str(folder / "orders")).restore(0)
    assert any("restored" in line for line in open_store(folder).problems(kit.NAME))
    fresh = open_store(folder)
    with pytest.raises(PublicationStuck, match=r"restored to an older version .*decision 2.*sink accept shop orders"):
        kit.process(fresh, number, kit.events([2], 1), 1)
    fresh.accept_sink(kit.NAME, "orders", by="me", reason="meant")
    kit.process(fresh, number, kit.events([2], 1), 1)
    assert show(folder) == [2] and open_store(folder).problems(kit.NAME) == []


def test_restored_dead_letters_are_told_from_the_first_one_on(folder: Path) -> None:
    """What holds for sinks holds for the table of dead letters: a letter that a RESTORE took back is missed."""
    store = open_store(folder)
    kit.process(store, kit.epoch(store), kit.events([1]), reject=lambda key: True)
    DeltaTable(str(folder / "state" / "dead_letters" / kit.NAME)).restore(0)
    assert any("'dedup.dead_letters'" in line and "restored" in line for line in open_store(folder).problems(kit.NAME))
    with pytest.raises(PublicationStuck, match="restored"):
        open_store(folder).publish(kit.NAME)


def test_a_restore_before_the_decision_is_no_concern(folder: Path) -> None:
    """What a sink was taken back to before we ever wrote to it is nobody's loss."""
    write_deltalake(str(folder / "orders"), pa.table({"id": [7], "text": ["foreign"]}, schema=kit.SINK), mode="append")
    DeltaTable(str(folder / "orders")).restore(0)
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    fresh = open_store(folder)
    assert fresh.problems(kit.NAME) == [] and fresh.publish(kit.NAME) == 0
    kit.process(fresh, number, kit.events([2], 1), 1)
    assert show(folder) == [1, 2]


@pytest.mark.parametrize("anew", of_which(1, [False, True]))
def test_a_foreign_append_that_is_undone_is_no_concern(folder: Path, anew: bool) -> None:
    """RESTORE to a version that has all that we published: nothing of ours is lost, so the stream goes on, also in a new process."""
    store = open_store(folder)
    number = kit.epoch(store)
    for key in (1, 2):
        process(store, number, key)
    for _ in range(2):
        foreign(folder)
        sink(folder).restore(2)
    store = open_store(folder) if anew else store
    assert open_store(folder).problems(kit.NAME) == []
    process(store, number, 3)
    foreign(folder)
    sink(folder).restore(sink(folder).version() - 1)
    process(store, number, 4)
    assert show(folder) == [1, 2, 3, 4]
    assert open_store(folder).problems(kit.NAME) == []


@pytest.mark.full
def test_restores_back_and_forth_are_followed(folder: Path) -> None:
    """Rows that a RESTORE took back are missing until another one brings them again; one to the first RESTORE takes them back again."""
    store = open_store(folder)
    number = kit.epoch(store)
    for key in (1, 2):
        process(store, number, key)
    sink(folder).restore(1)
    assert_told(folder, store, number)
    sink(folder).restore(2)
    assert open_store(folder).problems(kit.NAME) == []
    process(store, number, 3)
    foreign(folder)
    sink(folder).restore(3)  # the first RESTORE
    assert_told(folder, store, number)
    sink(folder).restore(5)
    process(store, number, 4)
    assert show(folder) == [1, 2, 3, 4]


def test_a_publication_that_no_header_tells_of_is_missed(folder: Path) -> None:
    """The last publication of a process that died, taken back to the one before it, which the header knows: not taken for done."""
    store = open_store(folder)
    number = kit.epoch(store)
    for key in (1, 2, 3):
        process(store, number, key)
    sink(folder).restore(2)
    fresh = open_store(folder)
    with pytest.raises(PublicationStuck, match=r"restored to an older version .*decision 4.*sink accept shop orders"):
        fresh.publish(kit.NAME)
    assert_told(folder, open_store(folder), number)
    fresh.accept_sink(kit.NAME, "orders", by="me", reason="meant")
    process(fresh, number, 4)
    assert show(folder) == [1, 2, 4] and open_store(folder).problems(kit.NAME) == []


def test_files_that_vacuum_removed_do_not_come_back(folder: Path) -> None:
    """A RESTORE that lists files which VACUUM has deleted brings nothing back: that is told, with the files."""
    store = open_store(folder)
    number = kit.epoch(store)
    for key in (1, 2):
        process(store, number, key)
    sink(folder).optimize.compact()
    sink(folder).vacuum(0, dry_run=False, enforce_retention_duration=False)
    sink(folder).restore(2, ignore_missing_files=True)
    assert_told(folder, store, number, "are gone|may be missing")


def test_a_restore_to_a_time_is_told(folder: Path, look: str) -> None:
    """The log does not say which version that was, so it cannot be told what is missing; the files of the last publication tell."""
    store = open_store(folder)
    number = kit.epoch(store)
    process(store, number, 1)
    foreign(folder)
    at, version = sink(folder).history()[0]["timestamp"], sink(folder).version()
    foreign(folder)
    for later in (0, 1):  # to a restore a commit has the time of its file, and two files may have the same one
        os.utime(folder / "orders/_delta_log" / f"{version + later:020}.json", (at / 1000 + later, at / 1000 + later))
    sink(folder).restore(_moment(at))
    if look == "by files":
        process(store, number, 2)
        assert show(folder) == [-1, 1, 2]
    else:
        assert_told(folder, store, number)


def _moment(millis: int) -> str:
    return pa.scalar(millis, pa.timestamp("ms", "UTC")).as_py().isoformat(timespec="milliseconds")


PATHS: dict[str, tuple[int, dict[int, int | None], int, int, list[int] | None]] = {
    # name: (version now, RESTOREs, version that was looked at, version of the publication, path)
    "no restore": (5, {}, 3, 3, []),
    "to a version behind it": (6, {6: 4}, 3, 3, [6]),
    "to the publication": (6, {6: 3}, 3, 3, [6]),
    "to before it": (6, {6: 2}, 3, 3, None),
    "to before it, but it came later than was noted": (6, {6: 3}, 3, 4, None),
    "to before what was noted, and it was earlier": (6, {6: 4}, 5, 3, [6]),
    "to a time": (6, {6: None}, 3, 3, None),
    "back and forth": (8, {6: 2, 8: 5}, 3, 3, [8]),
    "forth and back": (8, {6: 5, 8: 2}, 3, 3, None),
    "to a restore that took it back": (8, {6: 2, 8: 6}, 3, 3, None),
    "before it was made": (6, {2: 0}, 3, 3, []),
    "before it was noted": (6, {4: 1}, 5, 3, []),
    "by others, one after the other": (9, {5: 4, 7: 6, 9: 8}, 3, 3, [9, 7, 5]),
    "in a log that begins later": (9, {4: None, 9: 5}, 6, 3, None),
}


@pytest.mark.parametrize("name", PATHS)
def test_what_a_version_has_is_found_by_its_restores(name: str) -> None:
    """Each RESTORE is followed to its version, until none is left behind the publication."""
    now, restores, looked_at, made, path = PATHS[name]
    assert path_to(now, restores, looked_at, lambda version: version >= made) == path


def test_a_log_that_was_cleaned_is_no_restore(folder: Path) -> None:
    """Old entries of a sink's log are deleted after a checkpoint of it: where no RESTORE is seen, a batch goes on."""
    store = open_store(folder)
    number = kit.epoch(store)
    process(store, number, 1)
    for _ in range(3):
        foreign(folder)
    sink(folder).create_checkpoint()
    for version in range(4):
        (folder / "orders" / "_delta_log" / f"{version:020}.json").unlink()
    process(open_store(folder), number, 2)
    assert show(folder) == [-1, -1, -1, 1, 2] and open_store(folder).problems(kit.NAME) == []


@pytest.mark.parametrize("look", of_which(1, ["by files", "by the log"]), indirect=True)
@pytest.mark.parametrize("compacted", of_which(1, [False, True]))
def test_the_log_of_a_busy_sink_is_not_read(folder: Path, look: str, monkeypatch: pytest.MonkeyPatch, compacted: bool) -> None:
    """A daily job may find a hundred thousand commits of others: where the sink lists the job's own last files, none of them matters."""
    store, asked = open_store(folder), list[int | None]()
    number = kit.epoch(store)
    process(store, number, 1)
    process(store, number, 2)
    for _ in range(3):
        foreign(folder)
    if compacted:
        sink(folder).optimize.compact()
    history = tables.history_of

    def counted(table: DeltaTable, limit: int | None) -> Any:
        asked.append(limit)
        return history(table, limit)

    monkeypatch.setattr(tables, "history_of", counted)
    process(open_store(folder), number, 3)
    assert bool(asked) is (compacted or look == "by the log")
    assert show(folder) == [-1, -1, -1, 1, 2, 3]

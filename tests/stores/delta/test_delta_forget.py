"""What was erased leaves the files of Delta tables: rewritten beside others who commit, and deleted when the tables let them go."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from dedup import DeadLetters
from dedup.delta import erasure, tables
from dedup.delta.engine import DeltaRs
from kit.forgetting import files_with
from kit.orders import assert_proven, batch, consumer, event, letters
from kit.outgoing import Receiver, dispatcher
from kit.people import ALL, ANN
from kit.places import DeltaPlace

pytestmark = pytest.mark.delta

SECRET = "anna.schmidt"


@pytest.fixture
def delta(tmp_path: Path) -> DeltaPlace:
    """Three discarded letters in files of their own, the second one of SECRET, each with a message that was sent."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    run = consumer(place.store(), letters_to="dead", budget=None)
    for number, key in enumerate(["other-0", SECRET, "other-2"]):
        run(batch(event(number, key, -1)), number)
    dispatcher(place, Receiver()).once()
    DeadLetters(place.store()).discard(ALL, **ANN)
    return place


def forget(place: DeltaPlace) -> Any:
    """SECRET."""
    return DeadLetters(place.store()).forget("shop", key=SECRET, by="clerk", reason="request 17")


def own_tables(place: DeltaPlace) -> list[DeltaTable]:
    """The tables of letters and messages."""
    logs = sorted((place.folder / "state").rglob("_delta_log"))
    return [DeltaTable(log.parent) for log in logs if log.parent.parent.name != "ledger"]


def test_files_that_hold_it_go_when_the_tables_let_them_go(delta: DeltaPlace) -> None:
    """The report says until when they are there; the same command deletes them then, and says that nothing remains of them."""
    done = forget(delta)
    assert files_with(delta.folder / "state" / "dead_letters", SECRET) and files_with(delta.folder / "state" / "outbox", SECRET)
    old = [one for one in done.remains if one.where.startswith("older files")]
    in_a_week = dt.datetime.now(dt.UTC) + dt.timedelta(days=7)
    assert len(old) == 2 and all(one.until and abs(one.until - in_a_week) < dt.timedelta(minutes=5) for one in old)
    for table in own_tables(delta):
        table.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 hours"})
    again = forget(delta)
    assert files_with(delta.folder / "state", SECRET) == []
    assert [one for one in again.remains if one.where.startswith("older files")] == []
    assert_proven(delta.store())


def test_the_upkeep_deletes_such_files_too(delta: DeltaPlace) -> None:
    """Of letters and of messages, once the tables let them go; until then it leaves them."""
    forget(delta)
    store = delta.store()
    store.upkeep(dt.timedelta(days=30))
    assert len(files_with(delta.folder / "state", SECRET)) >= 3
    for table in own_tables(delta):
        table.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 hours"})
    store.upkeep(dt.timedelta(days=30))
    assert files_with(delta.folder / "state", SECRET) == []
    assert_proven(delta.store())


def test_only_files_that_hold_it_are_written_anew(delta: DeltaPlace) -> None:
    """Of three files of letters and three of messages one each is replaced."""
    before = [set(table.file_uris()) for table in own_tables(delta)]
    forget(delta)
    after = [set(table.file_uris()) for table in own_tables(delta)]
    gone = {Path(uri).parent.name: len(old - new) for old, new in zip(before, after, strict=True) for uri in old - new}
    assert gone["messages"] == 1 and gone["shop"] == 2, "of letters, the file that parked it and the one that discarded all of them"


def test_a_compaction_in_between_doubles_no_row(delta: DeltaPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were looked at may be others' when they are to be replaced: the commit is refused, and made on what is there then."""
    commits, compacted = tables.commit, list[str]()

    def commit(table: DeltaTable, adds: Any, transactions: Any, **how: Any) -> int:
        if how.get("removes") and table.table_uri not in compacted:
            compacted.append(table.table_uri)
            DeltaTable(table.table_uri).optimize.compact()
        return commits(table, adds, transactions, **how)

    monkeypatch.setattr(tables, "commit", commit)
    before = letters(delta.store())
    forget(delta)
    after = letters(delta.store())
    assert len(compacted) == 2 and len(after) == len(before)
    assert [row for row in after if row["idempotence_key"]] == [row for row in before if row["idempotence_key"] != SECRET]
    history = delta.store().history(*(row["id"] for row in before))
    assert history.num_rows == len(before) + 1, "one discard of each, and one erasure"
    assert all(SECRET not in str(table.to_pyarrow_table().to_pylist()) for table in own_tables(delta))
    assert_proven(delta.store())


def test_others_who_commit_without_a_pause_are_told(delta: DeltaPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some tries it gives up with an error that says what to do; called again, it goes on."""

    def refused(self: DeltaRs, table: DeltaTable, blank: erasure.Blank) -> int:
        raise tables.COMMIT_REFUSED("Failed to commit transaction: 7")

    with monkeypatch.context() as patched:
        patched.setattr(DeltaRs, "blank", refused)
        patched.setattr(erasure.time, "sleep", lambda seconds: None)
        patched.setattr(erasure, "LONGEST_PAUSE", 0.0)
        with pytest.raises(erasure.CommitConflict, match="Run it again"):
            forget(delta)
    assert forget(delta).is_done
    assert files_with(delta.folder / "state", SECRET), "older files have it"
    assert all(SECRET not in str(table.to_pyarrow_table().to_pylist()) for table in own_tables(delta))


INTERVALS = {
    None: 7,
    "interval 1 week": 7,
    "interval 30 days": 30,
    "interval 48 hours": 2,
    "2 days": 2,
    "interval 90 minutes": 1 / 16,
    "soon": 7,
}
"""As a table has it -> days."""


@pytest.mark.parametrize(("said", "days"), INTERVALS.items())
def test_a_table_says_how_long_it_keeps_files(said: str | None, days: float) -> None:
    """As Delta writes intervals; what is not understood counts as Delta's default."""
    assert erasure.kept_for({"delta.deletedFileRetentionDuration": said}) == dt.timedelta(days=days)

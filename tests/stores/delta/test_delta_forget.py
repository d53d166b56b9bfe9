"""What was erased leaves the files of Delta tables: rewritten beside others who commit, and deleted when the tables let them go."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from dedup import DeadLetters
from dedup.core.messages import Chosen, State
from dedup.delta import erasure, tables
from dedup.delta.engine import DeltaRs
from kit.forgetting import files_with
from kit.orders import assert_proven, batch, consumer, event, flatten, letters
from kit.outgoing import Receiver, dispatcher
from kit.people import ALL, ANN
from kit.places import DeltaPlace, SparkPlace

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.delta

SECRET = "anna.schmidt"


@pytest.fixture
def delta(tmp_path: Path) -> DeltaPlace:
    """A place with letters."""
    return with_letters(DeltaPlace(tmp_path))


def with_letters(place: DeltaPlace) -> DeltaPlace:
    """Three discarded letters in files of their own, the second one of SECRET, each with a message that was sent."""
    place.create_sink()
    run = consumer(place.store(), letters_to="dead", budget=None)
    for number, key in enumerate(["other-0", SECRET, "other-2"]):
        run(batch(event(number, key, -1)), number)
    dispatcher(place, Receiver()).once()
    DeadLetters(place.store()).discard(ALL, **ANN)
    return place


def forget(place: DeltaPlace, **options: Any) -> Any:
    """SECRET."""
    return DeadLetters(place.store()).forget("shop", key=SECRET, by="clerk", reason="request 17", **options)


def older(done: Any) -> list[Any]:
    """What a report says of files that left tables."""
    return [one for one in done.remains if one.where.startswith("older files")]


def own_tables(place: DeltaPlace) -> list[DeltaTable]:
    """The tables of letters and messages."""
    logs = sorted((place.folder / "state").rglob("_delta_log"))
    return [DeltaTable(log.parent) for log in logs if log.parent.parent.name != "ledger"]


def let_go(delta: DeltaPlace) -> None:
    """Nothing is kept of what left the tables, and a new checkpoint of each, as every hundred commits, does not name those files."""
    for table in own_tables(delta):
        table.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 hours"})
        table.create_checkpoint()


def test_files_that_hold_it_go_when_the_tables_let_them_go(delta: DeltaPlace) -> None:
    """The report says until when they are there; the same command deletes them then, and says that nothing remains of them."""
    done = forget(delta)
    assert files_with(delta.folder / "state" / "dead_letters", SECRET) and files_with(delta.folder / "state" / "outbox", SECRET)
    in_a_week = dt.datetime.now(dt.UTC) + dt.timedelta(days=7)
    assert len(older(done)) == 2 and all(one.until and abs(one.until - in_a_week) < dt.timedelta(minutes=5) for one in older(done))
    assert_they_go(delta)


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.timeout(1800)
def test_spark_deletes_such_files_too(spark: SparkSession, tmp_path: Path) -> None:
    """The same where only Spark has access to the tables."""
    place = with_letters(SparkPlace(tmp_path))
    assert len(older(forget(place))) == 2
    assert_they_go(place)


def assert_they_go(place: DeltaPlace) -> None:
    """A dry run names them as long as they are there, and the command deletes them, once their time is over."""
    let_go(place)
    left = older(forget(place, dry_run=True))
    assert len(left) == 2 and all(one.until < dt.datetime.now(dt.UTC) for one in left) and files_with(place.folder / "state", SECRET)
    assert older(forget(place)) == [] and files_with(place.folder / "state", SECRET) == []
    assert older(forget(place, dry_run=True)) == []
    assert_proven(place.store())


@pytest.mark.full
def test_what_a_failed_message_said_goes_from_the_logs_too(delta: DeltaPlace) -> None:
    """No log of a table has bounds of the texts in it: it outlives the files, and nothing writes it anew."""

    def refuse(messages: Any) -> None:
        raise UnicodeError(f"{SECRET}@example.com is no valid receiver")

    consumer(delta.store(), letters_to="dead", budget=None)(batch(event(3, SECRET, -2)), 3)
    dispatcher(delta, refuse).once()
    outbox = delta.store().outbox("shop")
    (failed,) = outbox.entries(Chosen((State.DEAD,)))
    assert SECRET in str(failed.error_message) and outbox.discard([failed.number], by="ann", reason=f"{SECRET} is gone") == 1
    DeadLetters(delta.store()).discard(ALL, **ANN)
    forget(delta)
    let_go(delta)
    assert older(forget(delta)) == [] and files_with(delta.folder / "state", SECRET) == []


@pytest.mark.full
def test_the_upkeep_deletes_such_files_too(delta: DeltaPlace) -> None:
    """Of letters and of messages, once the tables let them go, also in a process that does nothing else; until then it leaves them."""
    forget(delta)
    delta.store().upkeep(dt.timedelta(days=30))
    assert len(files_with(delta.folder / "state", SECRET)) >= 3
    let_go(delta)
    delta.store().upkeep(dt.timedelta(days=30))
    assert files_with(delta.folder / "state", SECRET) == []
    assert_proven(delta.store())


@pytest.mark.full
def test_rows_that_failed_attempts_have_staged_are_told_and_deleted(tmp_path: Path) -> None:
    """A handler that failed has left rows for a merge: the report names them until they are a week old; the same command deletes them."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    run = consumer(place.store(), budget=None)
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        merged = flatten(rows)
        tx.merge(merged, "orders", keys=["id"])
        if SECRET in merged["id"].to_pylist():
            tx.merge(merged.set_column(0, "id", pa.nulls(merged.num_rows, pa.string())), "orders", keys=["id"])  # forbidden: no key

    run(batch(event(0, SECRET), event(1, "b")), 0)
    DeadLetters(place.store()).discard(ALL, **ANN)
    (told,) = [one for one in forget(place).remains if "/staged/shop" in one.where]
    in_a_week = dt.datetime.now(dt.UTC) + dt.timedelta(days=7)
    assert files_with(place.folder / "state/staged", SECRET) and abs(told.until - in_a_week) < dt.timedelta(minutes=5)
    for path in (place.folder / "state/staged").rglob("*.parquet"):
        os.utime(path, (0, 0))
    assert any("/staged/shop" in one.where for one in forget(place, dry_run=True).remains), "a dry run deletes nothing"
    assert not any("/staged/shop" in one.where for one in forget(place).remains)
    assert files_with(place.folder / "state/staged", SECRET) == []


@pytest.mark.full
@pytest.mark.parametrize("gone", [False, True], ids=["waits", "its table is gone"])
def test_the_upkeep_leaves_files_that_a_decision_waits_with(delta: DeltaPlace, gone: bool) -> None:
    """As long as a sink has not got all that is decided, files that no table names are left: they may be of that decision."""

    class Died(Exception):
        pass

    def die(step: str) -> None:
        if step == "publish":
            raise Died

    with pytest.raises(Died):
        consumer(delta.store(on_step=die), budget=None)(batch(event(3, "d")), 3)
    if gone:
        delta.drop_sink()
    (written,) = DeltaTable(delta.store()._states.of("shop").letters_uri).file_uris()[:1]
    forgotten = Path(written).with_name("part-of-nobody.parquet")
    forgotten.write_bytes(Path(written).read_bytes())
    let_go(delta)
    delta.store().maintain("shop")
    assert forgotten.exists()


@pytest.mark.full
def test_only_files_that_hold_it_are_written_anew(delta: DeltaPlace) -> None:
    """Of three files of letters and three of messages one each is replaced."""
    before = [set(table.file_uris()) for table in own_tables(delta)]
    forget(delta)
    after = [set(table.file_uris()) for table in own_tables(delta)]
    gone = {Path(uri).parent.name: len(old - new) for old, new in zip(before, after, strict=True) for uri in old - new}
    assert gone["messages"] == 1 and gone["shop"] == 2, "of letters, the file that parked it and the one that discarded all of them"


@pytest.mark.full
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


@pytest.mark.full
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

"""Publication: decided rows reach every sink once and in order, whatever happens to the sinks in between."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import delta_kit as kit
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from checkpoint.errors import CommitConflict, ConfigError, PublicationStuck, SinkMismatch
from dedup import amendments
from dedup.delta import DeltaStore, sink
from dedup.delta.engine import DeltaRs
from dedup.delta.publish import Publisher
from dedup.delta.storage import require_put_if_absent
from dedup.rows import ArrowRows
from dedup.steps import Commit
from dedup.store import Selection

pytestmark = pytest.mark.delta


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with two sinks."""
    kit.create(str(tmp_path / "orders"))
    kit.create(str(tmp_path / "audit"), partition_by=["text"])
    return tmp_path


def open_store(place: Path, **options: Any) -> DeltaStore:
    """What a new process would open."""
    return DeltaStore(str(place / "state"), tables={n: str(place / n) for n in ("orders", "audit", "late")}, **options)


def show(place: Path, name: str = "orders") -> list[int]:
    """A sink."""
    return kit.ids(str(place / name))


def die_before_publishing(store: DeltaStore, number: int, batch: list[kit.Event], batch_id: int = 0, **options: Any) -> None:
    """Decide a batch and stop before any sink shows it."""

    class Died(Exception):
        pass

    def on_step(name: str) -> None:
        if name == "publish":
            raise Died

    before, store.on_step = store.on_step, on_step
    with pytest.raises(Died):
        kit.process(store, number, batch, batch_id, **options)
    store.on_step = before


def test_what_was_decided_is_published_by_the_next_transaction(place: Path) -> None:
    """A copy that died after the decision left it to the next one, in both sinks, in order."""
    store = open_store(place)
    number = kit.epoch(store)
    die_before_publishing(store, number, kit.events([1, 2]), sinks=("orders", "audit"), text="x")
    assert show(place) == show(place, "audit") == []
    assert any("not published" in line for line in open_store(place).problems(kit.NAME))
    kit.process(open_store(place), number, kit.events([3], 2), 1, sinks=("orders", "audit"), text="y")
    assert show(place) == show(place, "audit") == [1, 2, 3]
    assert open_store(place).problems(kit.NAME) == []


def test_publish_brings_what_is_decided_and_counts_it_once(place: Path) -> None:
    """`publish` returns how many decisions it brought; again, and from another process, there is nothing left."""
    store = open_store(place)
    number = kit.epoch(store)
    die_before_publishing(store, number, kit.events([1]))
    assert (open_store(place).publish(kit.NAME), open_store(place).publish(kit.NAME), store.publish(kit.NAME)) == (1, 0, 0)
    assert show(place) == [1]


def test_letters_show_before_they_are_published(place: Path) -> None:
    """A decided letter is a letter, whether or not its table shows it already."""
    store = open_store(place)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([9]), reject=lambda key: True)
    die_before_publishing(store, number, kit.events([1], 1), 1, reject=lambda key: True)
    assert open_store(place).letters(Selection()).num_rows == 2
    store.publish(kit.NAME)
    assert open_store(place).letters(Selection()).num_rows == 2


def test_two_publishers_at_once_publish_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that is overtaken between its look and its commit finds the transaction id, does nothing, and counts nothing."""
    store = open_store(place)
    number = kit.epoch(store)
    die_before_publishing(store, number, kit.events([1, 2]))
    real, met = Publisher._add, []

    def overtaken(self: Publisher, *args: Any) -> bool:
        if not met:
            met.append(1)
            assert open_store(place).publish(kit.NAME) == 1
        return real(self, *args)

    monkeypatch.setattr(Publisher, "_add", overtaken)
    assert open_store(place).publish(kit.NAME) == 0
    assert show(place) == [1, 2] and DeltaTable(str(place / "orders")).version() == 1


def test_a_sink_with_other_writers_and_compaction_shows_each_row_once(place: Path) -> None:
    """Foreign appends and OPTIMIZE between our publications disturb neither side."""
    store = open_store(place)
    number = kit.epoch(store)
    for i in range(4):
        kit.process(store, number, kit.events([i], i), i)
        other = DeltaTable(str(place / "orders"))
        other.optimize.compact()
        write_deltalake(other, pa.table({"id": [100 + i], "text": ["foreign"]}, schema=kit.SINK), mode="append")
    assert show(place) == [0, 1, 2, 3, 100, 101, 102, 103]
    assert store.problems(kit.NAME) == []


def test_a_sink_that_was_dropped_and_created_again_is_told_and_accepted(place: Path) -> None:
    """Another table under the old name stops the consumer with the command to go on; accepted, only new rows go there."""
    store = open_store(place)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    kit.process(store, number, kit.events([2], 1), 1)
    shutil.rmtree(place / "orders")
    kit.create(str(place / "orders"))
    for who in (store, open_store(place)):
        with pytest.raises(PublicationStuck, match="publish shop --accept-sink orders"):
            kit.process(who, number, kit.events([3], 2), 2)
    assert any("another table" in line for line in open_store(place).problems(kit.NAME))
    fresh = open_store(place)
    with pytest.raises(PublicationStuck, match="--lost"):  # nothing tells a new process that decision 3 was published before the drop
        fresh.accept_sink(kit.NAME, "orders", by="me", reason="re-created")
    fresh.accept_sink(kit.NAME, "orders", lost=True, by="me", reason="re-created")
    assert fresh.publish(kit.NAME) == 0
    assert kit.process(fresh, number, kit.events([3], 2), 2).written == [3]
    assert show(place) == [3]
    assert open_store(place).problems(kit.NAME) == []


def test_the_running_copy_accepts_without_losing_anything(place: Path) -> None:
    """Where it is known that everything was published, nothing has to be given up."""
    store = open_store(place)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    shutil.rmtree(place / "orders")
    kit.create(str(place / "orders"))
    store.accept_sink(kit.NAME, "orders", by="me", reason="re-created")
    kit.process(store, number, kit.events([2], 1), 1)
    assert show(place) == [2]


def test_decided_rows_follow_an_accepted_sink(place: Path) -> None:
    """Files that are still in the folder are published to the table that a person accepted there."""
    store = open_store(place)
    number = kit.epoch(store)
    die_before_publishing(store, number, kit.events([1]))
    shutil.rmtree(place / "orders" / "_delta_log")
    kit.create(str(place / "orders"))
    fresh = open_store(place)
    with pytest.raises(PublicationStuck):
        fresh.publish(kit.NAME)
    fresh.accept_sink(kit.NAME, "orders", by="me", reason="log lost")
    assert fresh.publish(kit.NAME) == 1 and show(place) == [1]


def test_a_sink_that_was_restored_is_told_and_accepted(place: Path) -> None:
    """RESTORE takes published rows back and keeps transaction ids: noticed at the next write, and by `problems`."""
    store = open_store(place)
    number = kit.epoch(store)
    for i in range(3):
        kit.process(store, number, kit.events([i], i), i)
    DeltaTable(str(place / "orders")).restore(1)
    with pytest.raises(PublicationStuck, match="restored to an older version"):
        kit.process(store, number, kit.events([3], 3), 3)
    assert any("restored" in line for line in open_store(place).problems(kit.NAME))
    store.accept_sink(kit.NAME, "orders", by="me", reason="meant")
    kit.process(store, number, kit.events([3], 3), 3)
    assert show(place) == [0, 3] and store.problems(kit.NAME) == []


def test_a_sink_that_vanished_is_told(place: Path) -> None:
    """Decided rows without a table: which decision, how many rows, and what to do."""
    store = open_store(place)
    number = kit.epoch(store)
    die_before_publishing(store, number, kit.events([1, 2]))
    shutil.rmtree(place / "orders")
    with pytest.raises(PublicationStuck, match=r"Decision 2 \(2 rows\).*accept-sink orders"):
        open_store(place).publish(kit.NAME)


def test_vacuumed_files_of_an_unpublished_decision_are_told(place: Path) -> None:
    """The files of a decision were deleted before it was published: an error, not a table that cannot be read."""
    store = open_store(place)
    number = kit.epoch(store)
    die_before_publishing(store, number, kit.events([1, 2]))
    for file in (place / "orders").glob("*.parquet"):
        os.remove(file)
    with pytest.raises(PublicationStuck, match=r"1 of 1 files.*are gone.*--lost"):
        open_store(place).publish(kit.NAME)
    fresh = open_store(place)
    fresh.accept_sink(kit.NAME, "orders", lost=True, by="me", reason="vacuumed")
    assert open_store(place).problems(kit.NAME) == []
    kit.process(fresh, number, kit.events([3], 2), 1)
    assert show(place) == [3]


@pytest.mark.parametrize(
    ("old", "new", "possible"),
    [
        (pa.int32(), pa.int64(), True),
        (pa.int64(), pa.int32(), False),
        (pa.int32(), pa.decimal128(2, 1), False),
        (pa.int32(), pa.decimal128(12, 2), True),
        (pa.int64(), pa.float64(), False),
        (pa.float32(), pa.float64(), True),
        (pa.decimal128(10, 2), pa.decimal128(12, 4), True),
        (pa.decimal128(10, 2), pa.decimal128(10, 4), False),
        (pa.date32(), pa.timestamp("us"), True),
        (pa.date32(), pa.timestamp("us", "UTC"), False),
        (pa.string(), pa.int64(), False),
        (pa.timestamp("us", "UTC"), pa.timestamp("us"), False),
    ],
)
def test_only_what_delta_can_widen_is_advised(old: pa.DataType, new: pa.DataType, possible: bool) -> None:
    """The protocol's table of type changes: an ALTER TABLE that Delta refuses is no advice."""
    from dedup.delta.targets import widens

    assert widens(old, new) is possible


def test_a_column_added_between_decision_and_publication_is_no_obstacle(place: Path) -> None:
    """The rows were checked against fewer columns; they still fit."""
    from deltalake.schema import Field, PrimitiveType

    store = open_store(place)
    number = kit.epoch(store)
    die_before_publishing(store, number, kit.events([1]))
    DeltaTable(str(place / "orders")).alter.add_columns([Field("more", PrimitiveType("long"))])
    assert open_store(place).publish(kit.NAME) == 1
    assert DeltaTable(str(place / "orders")).to_pyarrow_table().to_pylist() == [{"id": 1, "text": "", "more": None}]


def test_a_constraint_added_between_decision_and_publication_stops_it(place: Path) -> None:
    """Files are never added behind the back of a CHECK constraint."""
    store = open_store(place)
    number = kit.epoch(store)
    die_before_publishing(store, number, kit.events([1]))
    DeltaTable(str(place / "orders")).alter.add_constraint({"big": "id > 5"})
    with pytest.raises(PublicationStuck, match="CHECK constraint big"):
        open_store(place).publish(kit.NAME)
    assert show(place) == []


def test_a_sink_added_later_gets_what_is_written_from_then_on(place: Path) -> None:
    """A new name in the handler needs no ceremony."""
    store = open_store(place)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    kit.create(str(place / "late"))
    kit.process(store, number, kit.events([2], 1), 1, sinks=("orders", "late"))
    assert (show(place), show(place, "late")) == ([1, 2], [2])


def test_after_a_reset_nothing_old_comes_up_in_new_sinks(place: Path) -> None:
    """Decided and unpublished rows of the old life are dropped where their sink is gone; the keys are new again."""
    store = open_store(place)
    number = kit.epoch(store)
    die_before_publishing(store, number, kit.events([1, 2]))
    shutil.rmtree(place / "orders")
    open_store(place).amend(kit.NAME, amendments.reset, by="me", reason="again")
    kit.create(str(place / "orders"))
    fresh = open_store(place)
    assert kit.process(fresh, number, kit.events([1, 2])).written == [1, 2]
    assert show(place) == [1, 2] and open_store(place).problems(kit.NAME) == []


def test_partition_values_are_written_as_the_protocol_says(place: Path) -> None:
    """Numbers, dates, decimals, booleans, text with spaces and slashes, and NULL come back as they were given."""
    import datetime as dt
    from decimal import Decimal

    names = ("n", "d", "m", "b", "t")
    schema = pa.schema(
        [("id", pa.int64()), ("n", pa.int32()), ("d", pa.date32()), ("m", pa.decimal128(10, 2)), ("b", pa.bool_()), ("t", pa.string())]
    )
    kit.create(str(place / "late"), schema, partition_by=list(names))
    rows = [
        {"id": 1, "n": -5, "d": dt.date(2024, 2, 29), "m": Decimal("7.10"), "b": True, "t": "a b/c=%20é"},
        {"id": 2, "n": None, "d": None, "m": None, "b": None, "t": None},
        {"id": 3, "n": -5, "d": dt.date(2024, 2, 29), "m": Decimal("7.10"), "b": True, "t": "a b/c=%20é"},
    ]
    store = open_store(place)
    number = kit.epoch(store)
    with store.begin(kit.NAME, number) as tx:
        assert tx.write("late", ArrowRows(pa.Table.from_pylist(rows, schema=schema))) == 3
        tx.execute(Commit())
    table = DeltaTable(str(place / "late"))
    assert sorted(table.to_pyarrow_table().select(schema.names).to_pylist(), key=lambda r: r["id"]) == rows
    assert len(table.file_uris()) == 2


def test_an_empty_string_cannot_be_a_required_partition_value(place: Path) -> None:
    """Delta reads it as NULL; where NULL is forbidden it is refused, not changed."""
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("t", pa.string(), nullable=False)])
    kit.create(str(place / "late"), schema, partition_by=["t"])
    store = open_store(place)
    number = kit.epoch(store)
    with store.begin(kit.NAME, number) as tx, pytest.raises(SinkMismatch, match="empty string"):
        tx.write("late", ArrowRows(pa.table({"id": [1], "t": [""]})))


def test_what_an_attempt_wrote_vanishes_with_it(place: Path) -> None:
    """A half of a bisected batch that raises leaves nothing; what was written before and after it stays."""
    store = open_store(place)
    number = kit.epoch(store)

    def rows(key: int) -> ArrowRows:
        return ArrowRows(pa.table({"id": [key], "text": ["x"]}))

    with store.begin(kit.NAME, number) as tx:
        tx.write("orders", rows(1))
        with pytest.raises(ValueError, match="no"), tx.attempt():
            tx.write("orders", rows(2))
            tx.write("audit", rows(2))
            raise ValueError("no")
        with tx.attempt():
            tx.write("audit", rows(3))
        tx.execute(Commit())
    assert (show(place), show(place, "audit")) == ([1], [3])


def test_no_file_is_left_for_rows_that_do_not_fit(place: Path) -> None:
    """Wrong types, unknown columns and forbidden NULLs are found before a file exists."""
    store = open_store(place)
    number = kit.epoch(store)
    for table, says in (({"id": ["x"]}, "ALTER TABLE"), ({"id": [1], "x": [1]}, "ADD COLUMNS")):
        with store.begin(kit.NAME, number) as tx, pytest.raises(SinkMismatch, match=says):
            tx.write("orders", ArrowRows(pa.table(table)))
    assert not list((place / "orders").glob("*.parquet"))


def test_a_missing_sink_is_told_with_the_statement_that_creates_it(place: Path) -> None:
    """CREATE TABLE with the columns of the rows."""
    store = open_store(place)
    with store.begin(kit.NAME, kit.epoch(store)) as tx, pytest.raises(SinkMismatch, match=r"CREATE TABLE .*`id` BIGINT, `text` STRING"):
        tx.write("late", ArrowRows(pa.table({"id": [1], "text": ["x"]})))


def test_a_name_that_means_nothing_is_told_with_the_ways_to_say_it(place: Path) -> None:
    """Without Spark a plain name is a path or a key of tables=."""
    store = DeltaStore(str(place / "state"))
    with store.begin(kit.NAME, kit.epoch(store)) as tx, pytest.raises(ConfigError, match="tables="):
        tx.write("orders", ArrowRows(pa.table({"id": [1]})))
    with store.begin(kit.NAME, 1) as tx:
        assert tx.write(str(place / "orders"), ArrowRows(pa.table({"id": [1]}))) == 1


@pytest.mark.parametrize(
    ("settings", "schema_metadata", "reason"),
    [
        ({}, {}, None),
        ({"delta.enableChangeDataFeed": "true"}, {}, None),
        ({"delta.appendOnly": "true"}, {}, None),
        ({"delta.enableDeletionVectors": "true"}, {}, None),
        ({"delta.columnMapping.mode": "name"}, {}, "column mapping"),
        ({}, {"delta.generationExpression": "1"}, "a generated column"),
        ({}, {"CURRENT_DEFAULT": "1"}, "a default value"),
        ({}, {"delta.identity.start": 1}, "an identity column"),
    ],
)
def test_only_tables_known_to_be_safe_get_files(
    place: Path, settings: dict[str, str], schema_metadata: dict[str, Any], reason: str | None
) -> None:
    """Whatever Spark would do at a write, and delta-rs would not, sends the rows through Spark."""
    from deltalake.schema import Field, PrimitiveType, Schema

    schema = Schema([Field("id", PrimitiveType("long"), metadata=schema_metadata)])
    DeltaTable.create(str(place / "late"), schema, configuration=settings)
    found = sink.Sinks(DeltaRs(None)).open("late", str(place / "late"))
    assert (found.mode == "files") == (reason is None)
    assert reason is None or any(reason in told for told in found.special)


def test_a_check_constraint_or_an_unknown_feature_sends_rows_through_spark(place: Path) -> None:
    """delta-rs's plain commit evaluates no constraint: without Spark such a sink is refused before anything is written."""
    from deltalake import TableFeatures

    DeltaTable(str(place / "orders")).alter.add_constraint({"positive": "id > 0"})
    DeltaTable(str(place / "audit")).alter.add_feature(TableFeatures.DomainMetadata, allow_protocol_versions_increase=True)
    store = open_store(place)
    number = kit.epoch(store)
    for name in ("orders", "audit"):
        with store.begin(kit.NAME, number) as tx, pytest.raises(ConfigError, match="only be written by Spark"):
            tx.write(name, ArrowRows(pa.table({"id": [-1], "text": ["x"]})))
    assert sink.Sinks(DeltaRs(None)).open("audit", str(place / "audit")).special == ("table feature domainMetadata",)


@pytest.mark.parametrize(
    ("uri", "options", "fine"),
    [
        ("/data/x", None, True),
        ("abfss://c@a.dfs.core.windows.net/x", None, True),
        ("gs://b/x", None, True),
        ("s3://b/x", {"aws_conditional_put": "etag"}, True),
        ("s3a://b/x", {"AWS_S3_LOCKING_PROVIDER": "dynamodb"}, True),
        ("s3://b/x", None, False),
        ("s3://b/x", {"conditional_put": "disabled"}, False),
        ("s3://b/x", {"aws_conditional_put": "etag", "AWS_S3_ALLOW_UNSAFE_RENAME": "true"}, False),
        ("hdfs://n/x", None, False),
        ("/dbfs/x", None, False),
    ],
)
def test_storage_that_cannot_decide_between_two_writers_is_refused(uri: str, options: dict[str, str] | None, fine: bool) -> None:
    """Put-if-absent is what everything rests on: where it is not known to be there, nothing starts."""
    if fine:
        require_put_if_absent(uri, options)
        return
    with pytest.raises(ConfigError):
        require_put_if_absent(uri, options)


def test_a_store_on_such_storage_cannot_be_made() -> None:
    """The refusal comes with the first line of the program."""
    with pytest.raises(ConfigError, match="aws_conditional_put"):
        DeltaStore("s3://bucket/dedup")


def test_a_sink_written_twice_in_one_transaction_shows_both(place: Path) -> None:
    """Two writes of one handler are one publication."""
    store = open_store(place)
    number = kit.epoch(store)
    with store.begin(kit.NAME, number) as tx:
        for key in (1, 2):
            tx.write("orders", ArrowRows(pa.table({"id": [key]})))
        tx.execute(Commit())
    assert show(place) == [1, 2] and DeltaTable(str(place / "orders")).version() == 1


def test_a_transaction_of_a_fenced_copy_publishes_nothing_of_its_own(place: Path) -> None:
    """Its files lie in the sink's folder and no commit names them."""
    old, new = open_store(place), open_store(place)
    number = kit.epoch(old)
    with pytest.raises(CommitConflict), old.begin(kit.NAME, number) as tx:
        tx.write("orders", ArrowRows(pa.table({"id": [1]})))
        kit.process(new, number, kit.events([2]))
        tx.execute(Commit())
    assert show(place) == [2] and len(list((place / "orders").glob("*.parquet"))) == 2


def test_several_decisions_are_published_in_their_order(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink's transaction id says that everything up to it is there: the older decision comes first."""
    store = open_store(place)
    number = kit.epoch(store)
    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "publish", lambda self, fresh=None: 0)
        for i in range(3):
            kit.process(store, number, kit.events([i], i), i)
    assert show(place) == []
    assert open_store(place).publish(kit.NAME) == 3
    assert show(place) == [0, 1, 2]


def test_files_go_through_the_object_store_where_there_is_no_local_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that only delta-rs can reach: its file system writes, reads, lists and deletes, with the same result."""
    from dedup.delta import storage, takeover, turns

    for module in (storage, takeover, turns):
        monkeypatch.setattr(module, "is_local", lambda uri: False)
    for folder in (f"ledger/{kit.NAME}", f"dead_letters/{kit.NAME}", "heartbeat"):
        (place / "state" / folder).mkdir(parents=True)  # object storage has no folders to make
    store = open_store(place)
    number = kit.epoch(store)
    die_before_publishing(store, number, kit.events([1, 2, 3]), reject=lambda key: key == 3)
    with store.heartbeat(kit.NAME, number, 10):
        kit.process(open_store(place), number, kit.events([1, 4], 3), 1)
    fresh = open_store(place)
    assert show(place) == [1, 2, 4] and fresh.reserved(kit.NAME) == 4 and fresh.letters(Selection()).num_rows == 1
    assert fresh.consumers() == [kit.NAME] and fresh.problems(kit.NAME) == []
    assert '"epoch": 1' in (fresh._heartbeat(kit.NAME).read() or "")


def test_staged_rows_of_dead_attempts_are_cleared_in_time(place: Path) -> None:
    """A week old and named by no pending decision: gone; anything younger stays."""
    store = open_store(place)
    kit.epoch(store)
    old, young = (place / "state" / "staged" / kit.NAME / n / "part.parquet" for n in ("old", "young"))
    for file in (old, young):
        file.parent.mkdir(parents=True)
        file.touch()
    os.utime(old, (0, 0))
    store.maintain(kit.NAME)
    assert not old.exists() and young.exists()


def test_files_that_a_waiting_decision_lists_survive_maintenance(place: Path) -> None:
    """Their table does not name them yet, and however old they are they are the only ones with those letters."""
    store = open_store(place)
    number = kit.epoch(store)
    die_before_publishing(store, number, kit.events([1, 2, 3]), reject=lambda key: key == 3)
    folder = Path(store._states.of(kit.NAME).letters_uri)
    (waiting,) = folder.rglob("*.parquet")
    os.utime(waiting, (0, 0))
    store.maintain(kit.NAME)
    assert waiting.exists()
    fresh = open_store(place)
    assert fresh.publish(kit.NAME) == 1 and fresh.letters(Selection()).num_rows == 1 and show(place) == [1, 2]


def forget_transactions(place: Path, name: str = "orders") -> None:
    """Set the property under which Delta drops old transaction ids at a checkpoint."""
    DeltaTable(str(place / name)).alter.set_table_properties({"delta.setTransactionRetentionDuration": "interval 7 days"})


def test_a_sink_that_forgets_transactions_is_refused(place: Path) -> None:
    """delta.setTransactionRetentionDuration on a sink stops the first write, with the statement that takes it off."""
    store = open_store(place)
    number = kit.epoch(store)
    forget_transactions(place)
    with pytest.raises(SinkMismatch, match=r"ALTER TABLE delta.`.*orders` UNSET TBLPROPERTIES \('delta.setTransactionRetentionDuration'\)"):
        kit.process(store, number, kit.events([1]))
    assert show(place) == [] and store.batches(kit.NAME).num_rows == 0


def test_nothing_is_published_to_a_sink_that_may_have_forgotten(place: Path) -> None:
    """A sink that got the property after the decision stops the next publisher: it cannot tell whether the rows are there already."""
    store = open_store(place)
    number = kit.epoch(store)
    die_before_publishing(store, number, kit.events([1]))
    forget_transactions(place)
    with pytest.raises(PublicationStuck, match="UNSET TBLPROPERTIES") as told:
        open_store(place).publish(kit.NAME)
    assert "Decision 2 (1 rows)" in str(told.value) and "accept-sink" not in str(told.value)
    assert any("UNSET TBLPROPERTIES" in line for line in open_store(place).problems(kit.NAME))
    assert show(place) == []


def test_transaction_ids_say_when_they_were_written(place: Path) -> None:
    """Delta drops ids without a time at once where they may expire: those in a sink have the time of their publication."""
    store = open_store(place)
    kit.process(store, kit.epoch(store), kit.events([1]))
    entry = (place / "orders" / "_delta_log" / f"{1:020}.json").read_text().splitlines()
    (txn,) = [json.loads(line)["txn"] for line in entry if "txn" in json.loads(line)]
    written = DeltaTable(str(place / "orders")).history(1)[0]["timestamp"]
    assert abs(txn["lastUpdated"] - written) < 60_000


def test_a_restore_right_after_the_first_publication_is_told(place: Path) -> None:
    """No header tells yet where the first publication is: a new process knows from the decision what the sink was before it."""
    store = open_store(place)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    DeltaTable(str(place / "orders")).restore(0)
    assert any("restored" in line for line in open_store(place).problems(kit.NAME))
    fresh = open_store(place)
    with pytest.raises(PublicationStuck, match=r"restored to an older version .*decision 2.*--accept-sink orders"):
        kit.process(fresh, number, kit.events([2], 1), 1)
    fresh.accept_sink(kit.NAME, "orders", by="me", reason="meant")
    kit.process(fresh, number, kit.events([2], 1), 1)
    assert show(place) == [2] and open_store(place).problems(kit.NAME) == []


def test_restored_dead_letters_are_told_from_the_first_one_on(place: Path) -> None:
    """What holds for sinks holds for the table of dead letters: a letter that a RESTORE took back is missed."""
    store = open_store(place)
    kit.process(store, kit.epoch(store), kit.events([1]), reject=lambda key: True)
    DeltaTable(str(place / "state" / "dead_letters" / kit.NAME)).restore(0)
    assert any("'dedup.dead_letters'" in line and "restored" in line for line in open_store(place).problems(kit.NAME))
    with pytest.raises(PublicationStuck, match="restored"):
        open_store(place).publish(kit.NAME)


def test_a_restore_before_the_decision_is_no_concern(place: Path) -> None:
    """What a sink was taken back to before we ever wrote to it is nobody's loss."""
    write_deltalake(str(place / "orders"), pa.table({"id": [7], "text": ["foreign"]}, schema=kit.SINK), mode="append")
    DeltaTable(str(place / "orders")).restore(0)
    store = open_store(place)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    fresh = open_store(place)
    assert fresh.problems(kit.NAME) == [] and fresh.publish(kit.NAME) == 0
    kit.process(fresh, number, kit.events([2], 1), 1)
    assert show(place) == [1, 2]


def test_a_header_without_the_version_of_its_sinks_is_read(place: Path) -> None:
    """Ledgers of the time before headers told the sink's version go on: nothing is checked that was not written down."""
    from dedup.delta.header import Header

    store = open_store(place)
    kit.process(store, kit.epoch(store), kit.events([1]))
    header = store._states.of(kit.NAME).header
    assert header.sinks[0].version == 0
    told = json.loads(header.to_json())
    del told["sinks"][0]["version"]
    assert Header.from_json(json.dumps(told)).sinks[0].version is None

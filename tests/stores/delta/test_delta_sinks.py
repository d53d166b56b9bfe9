"""Publication: decided rows reach every sink once and in order, whatever happens to the sinks in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from checkpoint.errors import ConfigError, SinkMismatch
from deadletter.selection import Selection
from deadletter.store import Commit
from dedup.core.rows import ArrowRows, rows_of
from dedup.delta import DeltaStore, sinks
from dedup.delta.engine import DeltaRs
from dedup.delta.storage import require_put_if_absent
from kit import delta_kit as kit
from kit.delta_kit import open_store, show

pytestmark = pytest.mark.delta


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
    from dedup.delta.fit import widens

    assert widens(old, new) is possible


def test_partition_values_are_written_as_the_protocol_says(folder: Path) -> None:
    """Numbers, dates, decimals, booleans, text with spaces and slashes, and NULL come back as they were given."""
    import datetime as dt
    from decimal import Decimal

    names = ("n", "d", "m", "b", "t")
    schema = pa.schema(
        [("id", pa.int64()), ("n", pa.int32()), ("d", pa.date32()), ("m", pa.decimal128(10, 2)), ("b", pa.bool_()), ("t", pa.string())]
    )
    kit.create(str(folder / "late"), schema, partition_by=list(names))
    rows = [
        {"id": 1, "n": -5, "d": dt.date(2024, 2, 29), "m": Decimal("7.10"), "b": True, "t": "a b/c=%20é"},
        {"id": 2, "n": None, "d": None, "m": None, "b": None, "t": None},
        {"id": 3, "n": -5, "d": dt.date(2024, 2, 29), "m": Decimal("7.10"), "b": True, "t": "a b/c=%20é"},
    ]
    store = open_store(folder)
    number = kit.epoch(store)
    with store.begin(kit.NAME, number) as tx:
        assert tx.write("late", ArrowRows(pa.Table.from_pylist(rows, schema=schema))) == 3
        tx.execute(Commit())
    table = DeltaTable(str(folder / "late"))
    assert sorted(table.to_pyarrow_table().select(schema.names).to_pylist(), key=lambda r: r["id"]) == rows
    assert len(table.file_uris()) == 2


def test_an_empty_string_cannot_be_a_required_partition_value(folder: Path) -> None:
    """Delta reads it as NULL; where NULL is forbidden it is refused, not changed."""
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("t", pa.string(), nullable=False)])
    kit.create(str(folder / "late"), schema, partition_by=["t"])
    store = open_store(folder)
    number = kit.epoch(store)
    with store.begin(kit.NAME, number) as tx, pytest.raises(SinkMismatch, match="empty string"):
        tx.write("late", ArrowRows(pa.table({"id": [1], "t": [""]})))


def test_what_an_attempt_wrote_vanishes_with_it(folder: Path) -> None:
    """A half of a bisected batch that raises leaves nothing; what was written before and after it stays."""
    store = open_store(folder)
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
    assert (show(folder), show(folder, "audit")) == ([1], [3])


def test_no_file_is_left_for_rows_that_do_not_fit(folder: Path) -> None:
    """Wrong types, unknown columns and forbidden NULLs are found before a file exists."""
    store = open_store(folder)
    number = kit.epoch(store)
    for table, says in (({"id": ["x"]}, "Cast them in the handler"), ({"id": [1], "x": [1]}, "ADD COLUMNS")):
        with store.begin(kit.NAME, number) as tx, pytest.raises(SinkMismatch, match=says):
            tx.write("orders", ArrowRows(pa.table(table)))
    assert not list((folder / "orders").glob("*.parquet"))


def test_advice_names_the_table_as_spark_knows_it(folder: Path) -> None:
    """A key of tables= means nothing to Spark: every ALTER TABLE has the path; what cannot be widened gets no such advice."""
    narrow = pa.schema([pa.field("id", pa.int32()), pa.field("day", pa.string(), nullable=False)])
    kit.create(str(folder / "late"), narrow)
    store = open_store(folder)
    number, table = kit.epoch(store), f"ALTER TABLE delta.`{folder / 'late'}`"
    day = pa.array(["x"])
    for rows, says in (
        ({"id": pa.array([1], pa.int64()), "day": day}, f"can\\): {table} SET TBLPROPERTIES .*; {table} ALTER COLUMN `id` TYPE BIGINT\\."),
        ({"id": pa.array(["1"]), "day": day}, r"Cast them in the handler, or write into a new table\.$"),
        ({"id": pa.array([1], pa.int32()), "x": day}, f"{table} ADD COLUMNS"),
        ({"id": pa.array([1], pa.int32())}, f"{table} ALTER COLUMN `day` DROP NOT NULL"),
        ({"id": pa.array([1], pa.int32()), "day": pa.array([None], pa.string())}, f"{table} ALTER COLUMN `day` DROP NOT NULL"),
    ):
        with store.begin(kit.NAME, number) as tx, pytest.raises(SinkMismatch, match=says):
            tx.write("late", ArrowRows(pa.table(rows)))
    with store.begin(kit.NAME, number) as tx, pytest.raises(SinkMismatch, match=f"{table} SET TBLPROPERTIES"):
        tx.write("late", rows_of([{"id": 3_000_000_000, "day": "x"}]))


def test_a_sink_that_was_rewritten_with_a_wider_column_goes_on(folder: Path) -> None:
    """The way to a wider type that deltalake can read: while nothing runs, overwrite the table with itself, cast."""
    kit.create(str(folder / "late"), pa.schema([("id", pa.int32())]))
    store = open_store(folder)
    number = kit.epoch(store)
    with store.begin(kit.NAME, number) as tx:
        tx.write("late", ArrowRows(pa.table({"id": pa.array([1], pa.int32())})))
        tx.execute(Commit())
    assert store.publish(kit.NAME) == 0
    rows = DeltaTable(str(folder / "late")).to_pyarrow_table()
    write_deltalake(str(folder / "late"), rows.cast(pa.schema([("id", pa.int64())])), mode="overwrite", schema_mode="overwrite")
    with store.begin(kit.NAME, number) as tx:
        tx.write("late", ArrowRows(pa.table({"id": [3_000_000_000]})))
        tx.execute(Commit())
    assert show(folder, "late") == [1, 3_000_000_000]
    assert open_store(folder).problems(kit.NAME) == []


def test_a_missing_sink_is_told_with_the_statement_that_creates_it(folder: Path) -> None:
    """CREATE TABLE with the columns of the rows."""
    store = open_store(folder)
    with store.begin(kit.NAME, kit.epoch(store)) as tx, pytest.raises(SinkMismatch, match=r"CREATE TABLE .*`id` BIGINT, `text` STRING"):
        tx.write("late", ArrowRows(pa.table({"id": [1], "text": ["x"]})))


def test_a_name_that_means_nothing_is_told_with_the_ways_to_say_it(folder: Path) -> None:
    """Without Spark a plain name is a path or a key of tables=."""
    store = DeltaStore(str(folder / "state"))
    with store.begin(kit.NAME, kit.epoch(store)) as tx, pytest.raises(ConfigError, match="tables="):
        tx.write("orders", ArrowRows(pa.table({"id": [1]})))
    with store.begin(kit.NAME, 1) as tx:
        assert tx.write(str(folder / "orders"), ArrowRows(pa.table({"id": [1]}))) == 1


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
    folder: Path, settings: dict[str, str], schema_metadata: dict[str, Any], reason: str | None
) -> None:
    """Whatever Spark would do at a write, and delta-rs would not, sends the rows through Spark."""
    from deltalake.schema import Field, PrimitiveType, Schema

    schema = Schema([Field("id", PrimitiveType("long"), metadata=schema_metadata)])
    DeltaTable.create(str(folder / "late"), schema, configuration=settings)
    found = sinks.Sinks(DeltaRs(None)).open("late", str(folder / "late"))
    assert (found.mode == "files") == (reason is None)
    assert reason is None or any(reason in told for told in found.special)


def test_a_check_constraint_or_an_unknown_feature_sends_rows_through_spark(folder: Path) -> None:
    """delta-rs's plain commit evaluates no constraint: without Spark such a sink is refused before anything is written."""
    from deltalake import TableFeatures

    DeltaTable(str(folder / "orders")).alter.add_constraint({"positive": "id > 0"})
    DeltaTable(str(folder / "audit")).alter.add_feature(TableFeatures.IcebergCompatV1, allow_protocol_versions_increase=True)
    store = open_store(folder)
    number = kit.epoch(store)
    for name in ("orders", "audit"):
        with store.begin(kit.NAME, number) as tx, pytest.raises(ConfigError, match="only be written by Spark"):
            tx.write(name, ArrowRows(pa.table({"id": [-1], "text": ["x"]})))
    assert sinks.Sinks(DeltaRs(None)).open("audit", str(folder / "audit")).special == ("table feature icebergCompatV1",)


@pytest.mark.parametrize(
    ("uri", "options", "fine"),
    [
        ("/data/x", None, True),
        ("abfss://c@a.dfs.core.windows.net/x", None, True),
        ("gs://b/x", None, True),
        ("s3://b/x", {"aws_conditional_put": "etag"}, True),
        ("s3a://b/x", None, True),
        ("s3://b/x", {"AWS_ENDPOINT_URL": "http://minio:9000"}, False),
        ("s3://b/x", {"endpoint": "http://minio:9000", "AWS_S3_LOCKING_PROVIDER": "dynamodb"}, False),
        ("s3://b/x", {"AWS_ENDPOINT_URL": "http://minio:9000", "AWS_CONDITIONAL_PUT": "etag"}, True),
        ("s3://b/x", {"aws_conditional_put": "dynamo:locks"}, False),
        ("s3://b/x", {"conditional_put": "disabled"}, False),
        ("s3://b/x", {"aws_conditional_put": "etag", "AWS_S3_ALLOW_UNSAFE_RENAME": "true"}, False),
        ("hdfs://n/x", None, False),
        ("/dbfs/x", None, False),
        ("/Volumes/main/shop/x", None, False),
        ("/lakehouse/default/Files/x", None, False),
        ("/synfs/1/x", None, False),
        ("/data/Volumes/x", None, True),
    ],
)
def test_storage_that_cannot_decide_between_two_writers_is_refused(uri: str, options: dict[str, str] | None, fine: bool) -> None:
    """Put-if-absent is what everything rests on: where it is not known to be there, nothing starts."""
    if fine:
        require_put_if_absent(uri, options)
        return
    with pytest.raises(ConfigError):
        require_put_if_absent(uri, options)


@pytest.mark.parametrize("uri", ["dbfs:/shop", "s3:/bucket/shop", "abfss:/shop", "hdfs:/shop"])
def test_an_address_with_one_slash_is_no_folder_of_this_machine(uri: str) -> None:
    """Neither a store nor a sink begins in a relative folder that nobody meant; one of that name can be asked for."""
    with pytest.raises(ConfigError, match=r"Give its URI, such as abfss://"):
        DeltaStore(uri)
    with pytest.raises(ConfigError, match=r"Give its URI, such as abfss://"):
        DeltaStore("/data/dedup", tables={"orders": uri})
    assert DeltaStore(f"./{uri}").path.endswith(f"/{uri}")
    assert (DeltaStore("file:/data/a:/b").path, DeltaStore("c:/shop").path) == ("/data/a:/b", f"{Path.cwd()}/c:/shop")


@pytest.mark.parametrize("uri", ["jdbc:postgresql://h/shop", "mysql://h/shop", "hdfs://n/x"])
def test_the_refusal_of_an_unknown_scheme_names_every_scheme_that_a_store_can_have(uri: str) -> None:
    """A mistyped address of PostgreSQL arrives here too: the message says how to write one."""
    with pytest.raises(ConfigError, match=r"abfss, .* or s3; for a store in PostgreSQL, postgresql://"):
        require_put_if_absent(uri, None)


def test_a_store_on_such_storage_cannot_be_made() -> None:
    """The refusal comes with the first line of the program, for the store and for its sinks."""
    elsewhere = {"aws_endpoint": "http://minio:9000"}
    with pytest.raises(ConfigError, match="aws_conditional_put"):
        DeltaStore("s3://bucket/dedup", storage_options=elsewhere)
    with pytest.raises(ConfigError, match="aws_conditional_put"):
        DeltaStore("/data/dedup", tables={"orders": "s3://bucket/orders"}, storage_options=elsewhere)


def test_spark_commits_to_s3_only_where_somebody_answers_for_it() -> None:
    """Its writer there asks whether a version is taken, and writes it then: two of them lose rows."""
    with pytest.raises(ConfigError, match="dedup_spark_on_s3"):
        DeltaStore("s3://bucket/dedup", engine="spark")
    assert DeltaStore("s3://bucket/dedup", engine="spark", storage_options={"dedup_spark_on_s3": "true"})
    assert DeltaStore("abfss://c@a.dfs.core.windows.net/dedup", engine="spark")


def test_a_sink_written_twice_in_one_transaction_shows_both(folder: Path) -> None:
    """Two writes of one handler are one publication."""
    store = open_store(folder)
    number = kit.epoch(store)
    with store.begin(kit.NAME, number) as tx:
        for key in (1, 2):
            tx.write("orders", ArrowRows(pa.table({"id": [key]})))
        tx.execute(Commit())
    assert show(folder) == [1, 2] and DeltaTable(str(folder / "orders")).version() == 1


def test_files_go_through_the_object_store_where_there_is_no_local_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that only delta-rs can reach: its file system writes, reads, lists and deletes, with the same result."""
    from dedup.delta import epoch, storage

    for module in (storage, epoch):
        monkeypatch.setattr(module, "is_local", lambda uri: False)
    for part in (f"ledger/{kit.NAME}", f"dead_letters/{kit.NAME}", "heartbeat"):
        (folder / "state" / part).mkdir(parents=True)  # object storage has no folders to make
    store = open_store(folder)
    number = kit.epoch(store)
    kit.die_before_publishing(store, number, kit.events([1, 2, 3]), reject=lambda key: key == 3)
    with store.heartbeat(kit.NAME, number, 10):
        kit.process(open_store(folder), number, kit.events([1, 4], 3), 1)
    fresh = open_store(folder)
    assert show(folder) == [1, 2, 4] and fresh.reserved(kit.NAME) == 4 and fresh.letters(Selection()).num_rows == 1
    assert fresh.consumers() == [kit.NAME] and fresh.problems(kit.NAME) == []
    assert '"epoch": 1' in (fresh._heartbeat(kit.NAME).of(1) or "")

"""What only Spark can say about the Delta store: statistics, the row path, catalog names, files written by tasks."""

from __future__ import annotations

import contextlib
import datetime as dt
from decimal import Decimal
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaProtocolError
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from checkpoint.errors import ConfigError, PublicationStuck, RowsMisfit, RowsRefused, SinkMismatch, StoreUnavailable
from deadletter.store import Commit
from dedup.core.rows import ArrowRows
from dedup.core.steps import Merge
from dedup.delta import DeltaStore
from dedup.delta.engine import DeltaRs
from dedup.delta.sinks import Sinks
from dedup.spark import features
from dedup.spark.delta import quoted, tick
from fixtures.variants import of_which
from kit import delta_kit as kit
from kit.sparks import require

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.delta, pytest.mark.spark]

UTC = dt.UTC
MANY = pa.schema(
    [
        ("n", pa.int64()),
        ("small", pa.int8()),
        ("x", pa.float64()),
        ("text", pa.string()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("wall", pa.timestamp("us")),
        ("day", pa.date32()),
        ("money", pa.decimal128(20, 4)),
        ("raw", pa.binary()),
        ("flag", pa.bool_()),
        ("inner", pa.struct([("a", pa.int32()), ("b", pa.string())])),
        ("items", pa.list_(pa.int64())),
    ]
)


def row(n: int, **other: Any) -> dict[str, Any]:
    """One row of every type."""
    base = {
        "n": n,
        "small": n % 100,
        "x": n / 3,
        "text": f"{n:05} " + "ä€😀" * 20,
        "at": dt.datetime(1969 + n, 5, 1, 12, 0, 0, 123456, tzinfo=UTC),
        "wall": dt.datetime(1969 + n, 5, 1, 12, 0, 0, 999999),
        "day": dt.date(1960 + n, 2, 28),
        "money": Decimal(f"-{n}.1234"),
        "raw": b"\x00\xff",
        "flag": n % 2 == 0,
        "inner": {"a": n, "b": f"b{n}"},
        "items": [n, n + 1],
    }
    return base | other


ROWS = [
    [row(1), row(2)],
    [row(3, x=float("nan")), row(4, x=float("inf"))],
    [row(5, text="\U0010ffff" * 40), row(6, text=None, inner=None, money=None)],
    [row(7, inner={"a": None, "b": None}, items=None, at=None), row(8, text="")],
]


def write(store: DeltaStore, sink: str, tables: list[pa.Table]) -> None:
    """Each table is a transaction of its own, and so a file of its own."""
    number = kit.epoch(store)
    for table in tables:
        with store.begin(kit.NAME, number) as tx:
            tx.write(sink, ArrowRows(table))
            tx.execute(Commit())


@pytest.mark.full
def test_statistics_never_hide_a_row_from_spark(spark: SparkSession, tmp_path: Path) -> None:
    """Every predicate finds with data skipping what it finds without, at the bounds of every file, of every type that has bounds."""
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F

    uri = str(tmp_path / "many")
    kit.create(uri, MANY)
    write(DeltaStore(str(tmp_path / "state")), uri, [pa.Table.from_pylist(rows, schema=MANY) for rows in ROWS])
    frame = spark.read.format("delta").load(uri)
    rows = [r for part in ROWS for r in part]
    for column in ("x", "text", "at", "wall", "money", "inner.a"):
        values = [r["inner"] and r["inner"]["a"] if column == "inner.a" else r[column] for r in rows]
        tests = [frame.where(F.col(column) == F.lit(v)).agg(F.count("*")) for v in values if v is not None]
        found = [r[0] for r in reduce(DataFrame.unionAll, tests).collect()]
        assert found == [1] * len(tests), (column, values)
    assert frame.where("text IS NULL").count() == 1 and frame.where("at IS NULL").count() == 1


@pytest.mark.full
def test_statistics_let_spark_skip_files(spark: SparkSession, tmp_path: Path) -> None:
    """They are not only right but of use: a point predicate reads one file of four."""
    uri = str(tmp_path / "many")
    kit.create(uri, MANY)
    write(DeltaStore(str(tmp_path / "state")), uri, [pa.Table.from_pylist(rows, schema=MANY) for rows in ROWS])
    frame = spark.read.format("delta").load(uri)
    for predicate in ("n = 1", "at < '1971-06-01'", "day = '1961-02-28'", "money = -1.1234", "inner.a = 1"):
        files = {r[0] for r in frame.where(predicate).selectExpr("_metadata.file_name").collect()}
        assert len(files) == 1, predicate


@pytest.mark.full
def test_negative_decimals_as_partition_values_are_right_to_spark(spark: SparkSession, tmp_path: Path) -> None:
    """delta-rs shows them wrongly (0.-10), but what it writes into the log is right."""
    uri = str(tmp_path / "parts")
    schema = pa.schema([("id", pa.int64()), ("m", pa.decimal128(10, 2)), ("d", pa.date32()), ("t", pa.string())])
    kit.create(uri, schema, partition_by=["m", "d", "t"])
    rows = [{"id": 1, "m": Decimal("-0.10"), "d": dt.date(2024, 2, 29), "t": "a b/c=%20é"}, {"id": 2, "m": None, "d": None, "t": None}]
    write(DeltaStore(str(tmp_path / "state")), uri, [pa.Table.from_pylist(rows, schema=schema)])
    assert [r.asDict() for r in spark.read.format("delta").load(uri).orderBy("id").select(*schema.names).collect()] == rows
    assert spark.read.format("delta").load(uri).where("m = -0.10 AND t = 'a b/c=%20é'").count() == 1


@pytest.mark.full
def test_a_sink_partitioned_by_a_timestamp_takes_the_row_path(spark: SparkSession, tmp_path: Path) -> None:
    """Engines spell such partition values differently: Spark writes its own."""
    uri = str(tmp_path / "times")
    spark.sql(f"CREATE TABLE delta.`{uri}` (id BIGINT, at TIMESTAMP) USING delta PARTITIONED BY (at)")
    at = dt.datetime(2024, 1, 1, 12, tzinfo=UTC)
    write(DeltaStore(str(tmp_path / "state")), uri, [pa.table({"id": [1], "at": pa.array([at], pa.timestamp("us", "UTC"))})])
    assert Sinks(DeltaRs(None)).open("t", uri).mode == "rows"
    assert spark.read.format("delta").load(uri).selectExpr("id", "unix_micros(at)").collect() == [(1, int(at.timestamp() * 1e6))]


@pytest.mark.full
def test_the_advice_to_widen_a_column_works_and_says_who_can_read_the_table_then(spark: SparkSession, tmp_path: Path) -> None:
    """Its statements run as they stand; the rows are written; deltalake can no longer read the table, as it says."""
    require("4.0", "type widening in Delta")
    uri, wide = str(tmp_path / "narrow"), pa.table({"id": [3_000_000_000], "price": pa.array([Decimal("1.5")], pa.decimal128(12, 4))})
    kit.create(uri, pa.schema([("id", pa.int32()), ("price", pa.decimal128(5, 2))]))
    store = DeltaStore(str(tmp_path / "state"), tables={"orders": uri})
    write(store, "orders", [pa.table({"id": pa.array([1], pa.int32())})])
    with store.begin(kit.NAME, kit.epoch(store)) as tx, pytest.raises(RowsMisfit) as refused:
        tx.write("orders", ArrowRows(wide))
    told, statements = str(refused.value).rstrip(".").split("Spark and dedup can): ")
    for statement in statements.split("; "):
        spark.sql(statement)
    write(store, "orders", [wide])
    assert spark.read.format("delta").load(uri).selectExpr("sum(id)").collect() == [(3_000_000_001,)]
    assert "deltalake cannot read the table after that" in told and DeltaStore(store.path, tables={"orders": uri}).problems(kit.NAME) == []
    with pytest.raises(DeltaProtocolError, match="typeWidening"):
        DeltaTable(uri).to_pyarrow_table()


@pytest.fixture
def strict(spark: SparkSession, tmp_path: Path) -> str:
    """A sink with a CHECK constraint, a generated column and a length limit."""
    require("4.0", "generated columns in SQL")
    uri = str(tmp_path / "strict")
    spark.sql(f"CREATE TABLE delta.`{uri}` (id BIGINT NOT NULL, name VARCHAR(5), doubled BIGINT GENERATED ALWAYS AS (id * 2)) USING delta")
    spark.sql(f"ALTER TABLE delta.`{uri}` ADD CONSTRAINT positive CHECK (id > 0 AND doubled < 100)")
    return uri


@pytest.mark.full
def test_a_sink_with_rules_is_written_by_spark_once(spark: SparkSession, tmp_path: Path, strict: str) -> None:
    """Rows are staged, decided, and appended with the transaction id; published again, nothing changes."""
    store = DeltaStore(str(tmp_path / "state"))
    write(store, strict, [pa.table({"id": [1, 2], "name": ["a", None]}), pa.table({"id": [3], "name": ["c"], "doubled": [6]})])
    state = store._states.of(kit.NAME)
    state.pending |= {s for s, h in state.decided.items() if h.sinks}
    assert store.publish(kit.NAME) == 0
    assert sorted(map(tuple, spark.read.format("delta").load(strict).collect())) == [(1, "a", 2), (2, None, 4), (3, "c", 6)]
    assert DeltaStore(store.path).problems(kit.NAME) == []


def test_a_publication_that_spark_did_and_nobody_heard_of_is_not_done_again(
    spark: SparkSession, tmp_path: Path, strict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of Spark's append is lost: the transaction id in the sink says that it landed."""
    from dedup.spark.delta import SparkSide

    real = SparkSide.append

    def lost(self: SparkSide, *args: Any) -> None:
        real(self, *args)
        raise StoreUnavailable("connection lost")

    monkeypatch.setattr(SparkSide, "append", lost)
    write(DeltaStore(str(tmp_path / "state")), strict, [pa.table({"id": [1], "name": ["a"]})])
    assert spark.read.format("delta").load(strict).count() == 1


@pytest.mark.full
@pytest.mark.parametrize("how", [None, pytest.param(Merge(("id",)), marks=pytest.mark.full)])
def test_two_publishers_of_staged_rows_publish_them_once(
    spark: SparkSession, tmp_path: Path, strict: str, monkeypatch: pytest.MonkeyPatch, how: Merge | None
) -> None:
    """The other one was quicker, and removed the staged files. That is no error: the transaction id in the sink says that it is done."""
    from dedup.spark.delta import SparkSide

    first, name = DeltaStore(str(tmp_path / "state")), "append" if how is None else "merge"
    real = getattr(SparkSide, name)

    def other_first(self: SparkSide, *given: Any) -> None:
        monkeypatch.setattr(SparkSide, name, real)
        assert DeltaStore(first.path).publish(kit.NAME) == 1
        real(self, *given)

    monkeypatch.setattr(SparkSide, name, other_first)
    with first.begin(kit.NAME, kit.epoch(first)) as tx:
        rows = ArrowRows(pa.table({"id": [1, 2], "name": ["a", "b"]}))
        tx.write(strict, rows) if how is None else tx.merge(strict, rows, how)
        tx.execute(Commit())
    assert sorted(r["id"] for r in spark.read.format("delta").load(strict).collect()) == [1, 2]
    assert DeltaStore(first.path).problems(kit.NAME) == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"id": [1, -1], "name": ["a", "b"]}, "1 of 2 rows violate positive"),
        pytest.param({"id": [1, 60], "name": ["a", "b"]}, "1 of 2 rows violate positive", marks=pytest.mark.full),
        pytest.param({"id": [1], "name": ["toolong"]}, "length limit of name", marks=pytest.mark.full),
        pytest.param({"id": [1], "name": ["a"], "doubled": [3]}, "generated column doubled", marks=pytest.mark.full),
        pytest.param({"id": pa.array([None], pa.int64()), "name": ["a"]}, "forbids NULL in id", marks=pytest.mark.full),
    ],
)
def test_rows_that_break_a_rule_are_refused_before_the_decision(
    spark: SparkSession, tmp_path: Path, strict: str, rows: dict[str, Any], says: str
) -> None:
    """After the decision they would wedge publication for ever."""
    store = DeltaStore(str(tmp_path / "state"))
    with pytest.raises(RowsRefused, match=says):
        write(store, strict, [pa.table(rows)])
    assert store.head(kit.NAME).seq == 1 and spark.read.format("delta").load(strict).count() == 0


@pytest.mark.full
@pytest.mark.parametrize(("name", "says"), [(None, "violate NOT NULL of day"), ("garbage", "CAST_INVALID_INPUT")])
def test_a_row_of_which_a_sink_computes_nothing_is_refused_before_the_decision(
    spark: SparkSession, tmp_path: Path, name: str | None, says: str
) -> None:
    """A NULL where the computed column forbids it, or an error: the row is at fault, and neither the sink nor the stream stands still."""
    require("4.0", "generated columns in SQL")
    store, sink = DeltaStore(str(tmp_path / "state")), str(tmp_path / "sink")
    computed = "day DATE NOT NULL GENERATED ALWAYS AS (CAST(name AS DATE))"
    spark.sql(f"CREATE TABLE delta.`{sink}` (id BIGINT, name STRING, {computed}) USING delta")
    with pytest.raises(RowsRefused, match=says):
        write(store, sink, [pa.table({"id": [1, 2], "name": pa.array(["2026-01-31", name])})])
    write(store, sink, [pa.table({"id": [1], "name": ["2026-01-31"]})])
    assert spark.read.format("delta").load(sink).count() == 1


@pytest.mark.full
def test_a_sink_with_rules_is_merged_by_spark_once(spark: SparkSession, tmp_path: Path, strict: str) -> None:
    """Insert, update what is older, delete; staged, decided, merged with the transaction id; again: nothing; bad rows are refused."""
    store, how = DeltaStore(str(tmp_path / "state")), Merge(("id",), "name", "gone")
    number = kit.epoch(store)
    for rows in ([(1, "b", False), (2, "b", False)], [(1, "a", False), (2, "c", True), (3, "x", False)], [(3, "x", True)]):
        with store.begin(kit.NAME, number) as tx:
            table = pa.table(dict(zip(("id", "name", "gone"), zip(*rows, strict=True), strict=True)))
            assert tx.merge(strict, ArrowRows(table), how) == len(rows)
            tx.execute(Commit())
    with store.begin(kit.NAME, number) as tx, pytest.raises(RowsRefused, match="positive"):
        tx.merge(strict, ArrowRows(pa.table({"id": [-1], "name": ["a"]})), Merge(("id",)))
    state = store._states.of(kit.NAME)
    state.pending |= {s for s, h in state.decided.items() if h.sinks}
    assert store.publish(kit.NAME) == 0
    assert sorted(map(tuple, spark.read.format("delta").load(strict).collect())) == [(1, "b", 2), (3, "x", 6)]
    assert DeltaStore(store.path).problems(kit.NAME) == []
    assert spark.conf.get("spark.databricks.delta.write.txnAppId", None) is None


@pytest.mark.full
def test_a_condition_that_is_null_is_violated_here_as_in_delta(spark: SparkSession, tmp_path: Path) -> None:
    """What Spark itself would refuse is refused before the decision."""
    uri = str(tmp_path / "nulls")
    spark.sql(f"CREATE TABLE delta.`{uri}` (id BIGINT) USING delta")
    spark.sql(f"ALTER TABLE delta.`{uri}` ADD CONSTRAINT positive CHECK (id > 0)")
    with pytest.raises(SinkMismatch, match="positive"):
        write(DeltaStore(str(tmp_path / "state")), uri, [pa.table({"id": pa.array([None], pa.int64())})])
    with pytest.raises(Exception, match="DELTA_VIOLATE_CONSTRAINT"):
        spark.sql(f"INSERT INTO delta.`{uri}` VALUES (NULL)")


@pytest.mark.full
def test_old_dates_and_times_come_through_spark_as_they_are(spark: SparkSession, tmp_path: Path) -> None:
    """Staged rows are our own files: Spark 3.5 asks at dates before 1582 and times before 1900 which calendar others have meant."""
    uri, day, moment = str(tmp_path / "old"), dt.date(1500, 1, 31), dt.datetime(1899, 12, 31, 23, tzinfo=dt.UTC)
    rows = pa.table({"id": [1], "day": [day], "at": pa.array([moment], pa.timestamp("us", tz="UTC"))})
    kit.create(uri, rows.schema)
    spark.sql(f"ALTER TABLE delta.`{uri}` ADD CONSTRAINT positive CHECK (id > 0)")
    write(DeltaStore(str(tmp_path / "state")), uri, [rows])
    assert DeltaTable(uri).to_pyarrow_table().to_pylist() == rows.to_pylist()


@pytest.mark.full
def test_column_mapping_and_identity_take_the_row_path(spark: SparkSession, tmp_path: Path) -> None:
    """Physical column names and numbered columns are Spark's business."""
    require("4.0", "identity columns in SQL")
    mapped, numbered = str(tmp_path / "mapped"), str(tmp_path / "numbered")
    spark.sql(f"CREATE TABLE delta.`{mapped}` (`a b` BIGINT) USING delta TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    spark.sql(f"CREATE TABLE delta.`{numbered}` (no BIGINT GENERATED ALWAYS AS IDENTITY, id BIGINT) USING delta")
    store = DeltaStore(str(tmp_path / "state"))
    write(store, mapped, [pa.table({"a b": [1, 2]})])
    write(store, numbered, [pa.table({"id": [7]})])
    assert sorted(r[0] for r in spark.read.format("delta").load(mapped).collect()) == [1, 2]
    assert [r.asDict() for r in spark.read.format("delta").load(numbered).select("id").collect()] == [{"id": 7}]
    with pytest.raises(SinkMismatch, match="GENERATED ALWAYS"):
        write(store, numbered, [pa.table({"id": [8], "no": [1]})])


@pytest.mark.full
def test_a_sink_that_refuses_after_all_is_told_with_its_rows(spark: SparkSession, tmp_path: Path, strict: str) -> None:
    """A rule added between decision and publication: which decision, how many rows, which sink."""
    store = DeltaStore(str(tmp_path / "state"))

    def on_step(name: str) -> None:
        if name == "publish":
            spark.sql(f"ALTER TABLE delta.`{strict}` ADD CONSTRAINT small CHECK (id < 10)")

    store.on_step = on_step
    with pytest.raises(PublicationStuck, match=r"Decision 2 \(1 rows\)"):
        write(store, strict, [pa.table({"id": [20], "name": ["a"]})])


@pytest.fixture
def defaults(spark: SparkSession, tmp_path: Path) -> str:
    """A sink whose columns have a value where a row brings none."""
    uri = str(tmp_path / "defaults")
    columns = "id BIGINT, status STRING NOT NULL DEFAULT 'new', place STRING DEFAULT 'here'"
    spark.sql(f"CREATE TABLE delta.`{uri}` ({columns}) USING delta TBLPROPERTIES ('delta.feature.allowColumnDefaults' = 'supported')")
    return uri


@pytest.mark.full
def test_rows_with_other_columns_are_not_read_as_if_they_had_the_same(spark: SparkSession, tmp_path: Path, defaults: str) -> None:
    """What one file has no column for gets the default, what another one has keeps its value: on the driver, from tasks, between others."""
    store, given = DeltaStore(str(tmp_path / "state")), ({}, {"status": "x"}, {"status": "y", "place": "there"})
    number = kit.epoch(store)
    for turn in range(4):  # the names of files, and so the one that Spark looks at first, are random
        with store.begin(kit.NAME, number) as tx:
            tasks = tx.task_files(defaults)
            found = []
            for n in range(6):
                row = {"id": 10 * turn + n, **given[n % 3]}
                tx.write(defaults, ArrowRows(pa.Table.from_pylist([row])))
                found += tasks.write(ArrowRows(pa.Table.from_pylist([{**row, "id": row["id"] + 100}])))
            assert tx.adopt(defaults, found) == 6
            assert len(tx._writes.entries()) == 3
            tx.execute(Commit())
    rows = {r["id"]: (r["status"], r["place"]) for r in spark.read.format("delta").load(defaults).collect()}
    wanted = (("new", "here"), ("x", "here"), ("y", "there"))
    assert rows == {10 * turn + n + more: wanted[n % 3] for turn in range(4) for n in range(6) for more in (0, 100)}


@pytest.mark.full
def test_a_staged_file_that_cannot_be_read_is_not_left_out(
    spark: SparkSession, tmp_path: Path, strict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that skips broken files would publish fewer rows than were decided."""
    from dedup.spark.delta import SparkSide

    store, real = DeltaStore(str(tmp_path / "state")), SparkSide.append

    def broken(self: SparkSide, uri: str, files: Any, app: str, version: int) -> None:
        _, second = sorted(files)  # the first one is asked for the columns
        Path(second).write_bytes(b"PAR1" + bytes(100) + b"PAR1")
        real(self, uri, files, app, version)

    monkeypatch.setattr(SparkSide, "append", broken)
    spark.conf.set("spark.sql.files.ignoreCorruptFiles", "true")
    try:
        with store.begin(kit.NAME, kit.epoch(store)) as tx, pytest.raises((PublicationStuck, StoreUnavailable)):
            for number in (1, 2):
                tx.write(strict, ArrowRows(pa.table({"id": [number], "name": ["a"]})))
            tx.execute(Commit())
    finally:
        spark.conf.unset("spark.sql.files.ignoreCorruptFiles")
    assert spark.read.format("delta").load(strict).count() == 0 and store.head(kit.NAME).seq == 2


@pytest.mark.full
def test_a_merge_that_lacks_a_column_of_a_rule_says_so(spark: SparkSession, tmp_path: Path) -> None:
    """Whether such a row keeps to the rule nobody can tell; of single events it is the event's fault."""
    uri = str(tmp_path / "ruled")
    spark.sql(f"CREATE TABLE delta.`{uri}` (id BIGINT, name STRING, amount BIGINT) USING delta")
    spark.sql(f"ALTER TABLE delta.`{uri}` ADD CONSTRAINT positive CHECK (amount >= 0)")
    store = DeltaStore(str(tmp_path / "state"))
    with store.begin(kit.NAME, kit.epoch(store)) as tx, pytest.raises(RowsMisfit, match=r"positive.*amount"):
        tx.merge(uri, ArrowRows(pa.table({"id": [1], "name": ["x"]})), Merge(("id",)))


@pytest.mark.full
def test_rules_of_columns_that_rows_lack_do_not_count(spark: SparkSession, tmp_path: Path) -> None:
    """A merge that lacks a VARCHAR leaves its value; an appended row that lacks a default has it, also under a CHECK and a limit."""
    uri = str(tmp_path / "ruled")
    spark.sql(
        f"CREATE TABLE delta.`{uri}` (id BIGINT, name VARCHAR(5), status VARCHAR(5) DEFAULT 'new') USING delta "
        "TBLPROPERTIES ('delta.feature.allowColumnDefaults' = 'supported')"
    )
    spark.sql(f"ALTER TABLE delta.`{uri}` ADD CONSTRAINT known CHECK (status IN ('new', 'old'))")
    store = DeltaStore(str(tmp_path / "state"))
    with store.begin(kit.NAME, kit.epoch(store)) as tx:
        tx.write(uri, ArrowRows(pa.table({"id": [1]})))
        tx.merge(uri, ArrowRows(pa.table({"id": [1], "status": ["old"]})), Merge(("id",)))
        with pytest.raises(RowsRefused, match="length limit of name"):
            tx.merge(uri, ArrowRows(pa.table({"id": [1], "name": ["too long"], "status": ["old"]})), Merge(("id",)))
        tx.execute(Commit())
    with store.begin(kit.NAME, kit.epoch(store)) as tx:
        tx.write(uri, ArrowRows(pa.table({"id": [2], "name": ["x"]})))
        tx.execute(Commit())
    assert sorted(map(tuple, spark.read.format("delta").load(uri).collect())) == [(1, None, "old"), (2, "x", "new")]


@pytest.mark.parametrize("merged", of_which(1, [False, True]))
@pytest.mark.parametrize("rule", of_which(1, ["NOT NULL", "CHECK"]))
def test_an_empty_text_is_null_in_a_partition_column(spark: SparkSession, tmp_path: Path, rule: str, merged: bool) -> None:
    """Delta writes NULL for it, which the column forbids: the row is refused before it is decided, and no publication stands still."""
    uri = str(tmp_path / "ruled")
    null = "NOT NULL" if rule == "NOT NULL" else ""
    spark.sql(f"CREATE TABLE delta.`{uri}` (id BIGINT, name VARCHAR(5), country STRING {null}) USING delta PARTITIONED BY (country)")
    if rule == "CHECK":
        spark.sql(f"ALTER TABLE delta.`{uri}` ADD CONSTRAINT sold CHECK (country <> 'XX')")
    store = DeltaStore(str(tmp_path / "state"))
    with store.begin(kit.NAME, kit.epoch(store)) as tx:
        for country in ("", "DE"):
            rows = ArrowRows(pa.table({"id": [1], "name": ["x"], "country": [country]}))
            with contextlib.nullcontext() if country else pytest.raises(RowsRefused, match="country"):
                tx.merge(uri, rows, Merge(("id",))) if merged else tx.write(uri, rows)
        tx.execute(Commit())
    assert [tuple(row) for row in spark.read.format("delta").load(uri).collect()] == [(1, "x", "DE")]


@pytest.mark.full
def test_settings_of_the_session_survive_a_merge(spark: SparkSession, tmp_path: Path, strict: str) -> None:
    """A transaction id of ours is set for one statement, and what stood there before is back after it."""
    store, name = DeltaStore(str(tmp_path / "state")), "spark.databricks.delta.write.txnAppId"
    spark.conf.set(name, "mine")
    try:
        with store.begin(kit.NAME, kit.epoch(store)) as tx:
            tx.merge(strict, ArrowRows(pa.table({"id": [1], "name": ["x"]})), Merge(("id",)))
            tx.execute(Commit())
        assert spark.conf.get(name) == "mine"
    finally:
        spark.conf.unset(name)


MILLISECONDS = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MILLIS"}
"""As a session may write Parquet for old readers."""


@pytest.mark.full
@pytest.mark.parametrize("merged", [True, False])
def test_what_spark_writes_has_the_values_of_the_rows(spark: SparkSession, tmp_path: Path, merged: bool) -> None:
    """The session may cut the microseconds off in what it writes: not in a sink that only Spark can write."""
    sink, at = str(tmp_path / "sink"), dt.datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
    more = "TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')" if merged else ""
    generated = "" if merged else ", double BIGINT GENERATED ALWAYS AS (id * 2)"
    spark.sql(f"CREATE TABLE delta.`{sink}` (id BIGINT, at TIMESTAMP{generated}) USING delta {more}")
    store, rows = DeltaStore(str(tmp_path / "state")), ArrowRows(pa.table({"id": [1], "at": pa.array([at], pa.timestamp("us", "UTC"))}))
    with features.setting(spark, MILLISECONDS):
        with store.begin(kit.NAME, kit.epoch(store)) as tx:
            tx.merge(sink, rows, Merge(("id",))) if merged else tx.write(sink, rows)
            tx.execute(Commit())
        assert spark.conf.get(*MILLISECONDS) == "TIMESTAMP_MILLIS"
    assert [found.microsecond for (found,) in spark.read.format("delta").load(sink).select("at").collect()] == [at.microsecond]


@pytest.mark.full
def test_no_other_write_inherits_the_id_of_a_merge(
    spark: SparkSession, tmp_path: Path, strict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a merge runs, the job's other threads write with the same session: their commits carry no id of ours, and none is skipped."""
    from dedup.spark import delta

    other, real = str(tmp_path / "other"), delta._merge_sql
    kit.create(other, pa.schema([("id", pa.int64())]))

    def meanwhile(uri: str, *args: Any) -> str:
        for _ in range(2):  # the second one would be skipped, as one with the same id
            spark.range(1).write.format("delta").mode("append").save(other)
        return real(uri, *args)

    monkeypatch.setattr(delta, "_merge_sql", meanwhile)
    store = DeltaStore(str(tmp_path / "state"))
    for n in (1, 2):
        with store.begin(kit.NAME, kit.epoch(store)) as tx:
            tx.merge(strict, ArrowRows(pa.table({"id": [1], "name": [str(n)]})), Merge(("id",)))
            tx.execute(Commit())
    assert [tuple(r) for r in spark.read.format("delta").load(strict).collect()] == [(1, "2", 2)]
    assert spark.read.format("delta").load(other).count() == 4
    assert DeltaTable(other).version() == 4 and '{"txn"' not in "".join(f.read_text() for f in Path(other).glob("_delta_log/*.json"))
    assert DeltaStore(store.path).problems(kit.NAME) == []


def test_the_session_of_merges_has_the_settings_of_the_job(spark: SparkSession) -> None:
    """As they are now: what the job sets is there, secrets as well, and what it takes back is gone."""
    spark.conf.set("spark.dedup.test.token", "secret")
    assert features.apart(spark).conf.get("spark.dedup.test.token") == "secret"
    spark.conf.unset("spark.dedup.test.token")
    other = features.apart(spark)
    assert other.conf.get("spark.dedup.test.token", "gone") == "gone"
    assert other is features.apart(spark) and other is not spark


@pytest.mark.full
def test_a_table_of_the_catalog_is_found_by_its_name(spark: SparkSession, tmp_path: Path) -> None:
    """One, two and three parts; a name that is none is told, with the one that was meant."""
    spark.sql(f"CREATE TABLE named_sink (id BIGINT, text STRING) USING delta LOCATION '{tmp_path}/named'")
    try:
        store = DeltaStore(str(tmp_path / "state"))
        for i, name in enumerate(("named_sink", "default.named_sink", "spark_catalog.default.named_sink")):
            write(store, name, [pa.table({"id": [i], "text": ["x"]})])
        assert sorted(r[0] for r in spark.table("named_sink").collect()) == [0, 1, 2]
        with pytest.raises(ConfigError, match="no_such") as caught:
            write(store, "no_such", [pa.table({"id": [1]})])
        assert "DETAIL" not in str(caught.value)
        named = DeltaStore(str(tmp_path / "state"), tables={"orders": f"{tmp_path}/orders"})
        with pytest.raises(ConfigError, match=r"Did you mean 'orders'\? The names in tables= are orders\."):
            write(named, "ordres", [pa.table({"id": [1]})])
    finally:
        spark.sql("DROP TABLE named_sink")


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(parts=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=3))
@example(parts=["a.b", "c`d"])
@example(parts=["`; drop table x; --", "``"])
def test_any_name_of_a_table_is_a_name(spark: SparkSession, parts: list[str]) -> None:
    """Spark's own parser finds in what we write for a table's name the parts that it was given, and nothing else."""
    parser = spark._jsparkSession.sessionState().sqlParser()  # type: ignore[attr-defined]

    def parsed(name: str) -> list[str]:
        return [str(part) for part in parser.parseMultipartIdentifier(quoted(name)).mkString("\0").split("\0")]

    given = [part.replace("\0", "") or "x" for part in parts]
    assert parsed(".".join(tick(part) for part in given)) == given
    plain = [part.replace(".", "").replace("`", "") or "x" for part in given]
    assert parsed(".".join(plain)) == plain


@pytest.mark.parametrize("name", ["", ".a", "a.", "a..b", "a`b", "`a", "``", "`x` y", "a.`b`c"])
def test_what_is_no_name_of_a_table_is_refused(name: str) -> None:
    """Empty parts, and backticks that belong to nothing."""
    with pytest.raises(ConfigError, match="is not the name of a table"):
        quoted(name)


def test_files_that_tasks_write_are_published_like_others(spark: SparkSession, tmp_path: Path) -> None:
    """Rows never come to the driver: each task writes its files, the driver only names them in the decision."""
    from dedup.spark.frames import SparkRows

    uri = str(tmp_path / "big")
    kit.create(uri, pa.schema([("id", pa.int64()), ("bucket", pa.int32())]), partition_by=["bucket"])
    store = DeltaStore(str(tmp_path / "state"))
    number = kit.epoch(store)
    frame = spark.range(0, 1000, numPartitions=3).selectExpr("id", "cast(id % 2 as int) as bucket")
    with store.begin(kit.NAME, number) as tx:
        assert tx.write(uri, SparkRows(frame, in_tasks=True)) == 1000
        assert DeltaTable(uri).version() == 0
        tx.execute(Commit())
    assert len(DeltaTable(uri).file_uris()) == 6
    assert kit.ids(uri) == list(range(1000))
    wrong = spark.range(3).selectExpr("id", "cast(null as int) as bucket", "id as extra")
    with store.begin(kit.NAME, number) as tx, pytest.raises(SinkMismatch, match="extra"):
        tx.write(uri, SparkRows(wrong, in_tasks=True))


def test_a_value_that_does_not_fit_is_told_by_the_task_that_met_it(spark: SparkSession, tmp_path: Path) -> None:
    """A forbidden NULL among rows that never come to the driver is the same clear error."""
    from dedup.spark.frames import SparkRows

    uri = str(tmp_path / "required")
    kit.create(uri, pa.schema([pa.field("id", pa.int64(), nullable=False)]))
    store = DeltaStore(str(tmp_path / "state"))
    frame = spark.range(10).selectExpr("nullif(id, 7) as id")
    with store.begin(kit.NAME, kit.epoch(store)) as tx, pytest.raises(SinkMismatch, match="forbids NULL in id"):
        tx.write(uri, SparkRows(frame, in_tasks=True))


def test_the_state_can_be_asked_in_sql(spark: SparkSession, tmp_path: Path) -> None:
    """Checkpoints, batches, reservations and letters as temporary views."""
    kit.create(str(tmp_path / "orders"))
    store = DeltaStore(str(tmp_path / "state"), tables={"orders": str(tmp_path / "orders")})
    kit.process(store, kit.epoch(store), kit.events([1, 2, 3]), reject=lambda key: key == 2)
    names = ["batches", "blocked_sequences", "checkpoints", "dead_letters", "letter_history", "reservations"]
    assert sorted(store.views(spark)) == [f"dedup_{name}" for name in names]
    assert spark.sql("SELECT * FROM dedup_letter_history").count() == spark.sql("SELECT * FROM dedup_blocked_sequences").count() == 0
    assert spark.sql("SELECT consumer, sequence_number FROM dedup_checkpoints").collect() == [(kit.NAME, 2)]
    assert spark.sql("SELECT held, count(*) FROM dedup_reservations GROUP BY held ORDER BY held").collect() == [(False, 2), (True, 1)]
    assert spark.sql("SELECT reserved FROM dedup_batches").collect() == [(3,)]
    assert spark.sql("SELECT kind, cast(body AS string) FROM dedup_dead_letters").collect() == [("REJECTED", "2")]


@pytest.mark.full
def test_the_views_have_all_consumers(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those behind one that has not processed anything yet: an empty piece of a table is not its end."""
    kit.create(str(tmp_path / "orders"))
    store = DeltaStore(str(tmp_path / "state"), tables={"orders": str(tmp_path / "orders")})
    for number, name in enumerate(("a", "b", "c")):
        monkeypatch.setattr(kit, "NAME", name)
        epoch = kit.epoch(store)
        if name != "b":
            kit.process(store, epoch, kit.events([number]), number)
    store.views(spark)
    found = spark.sql("SELECT consumer FROM dedup_batches ORDER BY consumer").collect()
    assert [row[0] for row in found] == ["a", "c"]


@pytest.mark.full
def test_spark_reads_the_ledger(spark: SparkSession, tmp_path: Path) -> None:
    """The ledger is a plain Delta table: after a checkpoint and a compaction by delta-rs, too."""
    kit.create(str(tmp_path / "orders"))
    store = DeltaStore(str(tmp_path / "state"), tables={"orders": str(tmp_path / "orders")})
    number = kit.epoch(store)
    for i in range(4):
        kit.process(store, number, kit.events([i], i), i)
    store.maintain(kit.NAME)
    DeltaTable(str(tmp_path / "state/ledger/shop")).create_checkpoint()
    ledger = spark.read.format("delta").load(str(tmp_path / "state/ledger/shop"))
    assert ledger.where("kind = 'header'").count() == 5 and ledger.where("section = 'keys' AND seq = 3").count() == 1

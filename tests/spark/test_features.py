"""What an older Spark lacks has a way around it, which gives the same rows. `make matrix` runs all of Spark's tests on real older ones."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from fixtures.variants import of_which
from kit.orders import assert_proven, batch, consumer, event, flatten, ids, orders
from kit.places import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = pa.table(
    {
        "n": pa.array(range(25_000), pa.int64()),
        "word": pa.array([None if n % 7 == 0 else f"w{n}" for n in range(25_000)]),
        "at": pa.array([dt.datetime(2026, 1, 31, tzinfo=dt.UTC)] * 25_000, pa.timestamp("us", tz="UTC")),
        "inner": pa.array([{"a": n, "b": [n, None]} for n in range(25_000)]),
    }
)


@pytest.fixture
def older(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """This session, of which the library finds nothing that came after Spark 3.5."""
    from dedup.spark import features

    features.stand_ins.clear()
    monkeypatch.setattr(features, "takes_arrow", lambda: False)
    for kind in type(spark.range(1)).__mro__:
        for name in ("toArrow", "repartitionById"):
            if name in vars(kind):
                monkeypatch.delattr(kind, name)
    return spark


@pytest.mark.full
def test_rows_go_to_an_older_spark_and_come_back_as_they_are(older: SparkSession) -> None:
    """Many and none, with nulls, times, structs and lists, in their order; columns with odd names, and one name twice."""
    from dedup.spark.features import create, to_arrow

    for table in (ROWS, ROWS.slice(0, 1), ROWS.slice(0, 0)):
        assert to_arrow(create(older, table)).to_pylist() == table.to_pylist()
    odd = older.sql("select 1 `a.b`, 2 `c``d`, 3 e, 4 e")
    assert [column.to_pylist() for column in to_arrow(odd).columns] == [[1], [2], [3], [4]]


@pytest.mark.parametrize("limit", ["0", "-1", "2"])
def test_a_frame_is_made_whatever_limits_the_rows_of_a_piece(spark: SparkSession, limit: str) -> None:
    """Zero and less mean no limit to Spark, and to Arrow an error, which would be taken for the handler's; the setting stays."""
    from dedup.spark.features import create, setting, to_arrow

    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    with setting(spark, {name: limit}):
        assert to_arrow(create(spark, ROWS.slice(0, 5))).to_pylist() == ROWS.slice(0, 5).to_pylist()
        assert spark.conf.get(name) == limit


@pytest.mark.full
@pytest.mark.fast_on("delta")
def test_a_session_without_a_limit_parks_no_event(spark: SparkSession, place: Place) -> None:
    """The handler's frame, and what is left of it after a rejection, are there for each event."""
    from dedup.spark.features import create, setting

    made = consumer(place.store())
    made._handler = lambda rows, tx: tx.write(tx.reject(rows, "data.amount = 1", "one").select("data.*"), "orders")
    with setting(spark, {"spark.sql.execution.arrow.maxRecordsPerBatch": "0"}):
        made(create(spark, batch(*orders(range(3)))), 0)
    assert ids(place.read()) == ["p0-0", "p0-2"]


def assert_null_structs_come(spark: SparkSession) -> None:
    """Of fields that cannot be null, alone, twice under one name, in a list and in a map."""
    from dedup.spark.features import to_arrow

    some = "if(id = 0, null, named_struct('n', id, 'in', named_struct('m', id)))"
    columns = ["id", f"{some} s", f"{some} s", f"array({some}) many", f"map('k', {some}) named"]
    frame = spark.range(2).selectExpr(*columns)
    assert not frame.schema["many"].dataType.elementType["n"].nullable
    one = {"n": 1, "in": {"m": 1}}
    found = [column.to_pylist() for column in to_arrow(frame).columns]
    assert found == [[0, 1], [None, one], [None, one], [[None], [one]], [[("k", None)], [("k", one)]]]


def test_a_null_struct_comes_to_the_driver_whatever_its_fields_promise(spark: SparkSession) -> None:
    """As of `F.when(..., F.struct(...))`: Arrow does not cast it to fields that cannot be null, and a stream would stand still."""
    assert_null_structs_come(spark)


def test_a_null_struct_comes_to_the_driver_of_an_older_spark(older: SparkSession) -> None:
    """The same where Spark has no `toArrow`."""
    assert_null_structs_come(older)


@pytest.mark.parametrize("way", ["shuffled", "written"])
def test_columns_of_any_name_reach_the_tasks(spark: SparkSession, way: str) -> None:
    """Dots and backticks are parts of a name there: a stream with such a column would stand still for ever."""
    from dedup.spark.features import arrow_schema
    from dedup.spark.frames import SparkRows
    from dedup.spark.tasks import SparkTasks

    frame = spark.sql("select 's' source, 't' topic, 0 partition, 1L sequence_number, 0L part, 'x' `a.b`, 'y' `c``d.e`, map('k.v', 1) m")
    if way == "shuffled":
        (row,) = SparkTasks(frame).run(frame, lambda batches: batches, arrow_schema(frame.schema), 2).to_pylist()
        assert (row["a.b"], row["c`d.e"]) == ("x", "y")
    else:
        columns = ["c`d.e", "a.b"]
        (told,) = SparkRows(frame, in_tasks=True).files(lambda batches: (str(row) for b in batches for row in b.to_pylist()), columns)
        assert told == str({"c`d.e": "y", "a.b": "x"})


def test_each_row_goes_to_the_task_of_its_number(older: SparkSession) -> None:
    """Whatever the number of tasks: none is left idle, and none gets two numbers."""
    from pyspark.sql import functions as F

    from dedup.spark.features import place

    for tasks in (1, 2, 7):
        frame = older.range(100).withColumn("task", (F.col("id") % tasks).cast("int"))
        found = place(frame, tasks, F.col("task")).select("task", F.spark_partition_id().alias("at")).distinct().collect()
        assert len(found) == tasks == len({row["at"] for row in found})


@pytest.mark.full
@pytest.mark.fast_on("delta")
@pytest.mark.parametrize("where", of_which(1, ["frame", "tasks"]))
def test_a_consumer_on_an_older_spark_writes_each_order_once(older: SparkSession, place: Place, where: str) -> None:
    """A handler of frames, and one of Arrow tables in tasks: new, duplicate, rejected and redelivered events."""
    from dedup.spark.features import create

    def good(rows: pa.Table, tx: Any) -> pa.Table:
        return flatten(tx.reject(rows, pc.less(pc.struct_field(rows["data"], "amount"), 0), "negative amount"))

    run = consumer(place.store())
    run._handler = None
    if where == "frame":
        run.foreach_batch(lambda rows, tx: tx.write(tx.reject(rows, "data.amount < 0", "negative amount").select("data.*"), "orders"))
    else:
        run.foreach_arrow(into="orders")(good)
    rows: list[dict[str, Any]] = [
        *orders(range(20)),
        event(20, "bad", -1),
        *orders(range(20), partition=1),
        event(20, "p0-0", 0, partition=1),
    ]
    report = run(create(older, batch(*rows)), 0)
    assert (report.processed, report.duplicates, report.dead_lettered) == (40, 1, 1)
    assert run(create(older, batch(*rows)), 0).redelivered == len(rows)
    assert len(ids(place.read())) == 40
    assert_proven(place.store())

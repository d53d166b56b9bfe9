"""What a handler only picked from its frame comes from Arrow; it has to be what Spark would have answered."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dedup.core.rows import arrow_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 6_000
"""More than a local relation is made of."""

INNER = pa.struct([("id", pa.string()), ("at", pa.timestamp("us", "UTC")), ("deep", pa.struct([("n", pa.int64())]))])
VALUES = [None, {"id": None, "at": None, "deep": None}, {"id": "a", "at": dt.datetime(2026, 1, 1, tzinfo=dt.UTC), "deep": {"n": 7}}]
TABLE = pa.table(
    {"n": pa.array(range(ROWS), pa.int64()), "body": [b"x"] * ROWS, "data": pa.array([VALUES[i % 3] for i in range(ROWS)], INNER)}
)


@pytest.fixture(params=[5, ROWS], ids=["few", "many"])
def origin(spark: SparkSession, request: pytest.FixtureRequest) -> tuple[DataFrame, pa.Table]:
    """A handler's frame and its table."""
    from pyspark.sql.pandas.types import from_arrow_schema

    from dedup.spark.batch import create_frame

    return create_frame(spark, table := TABLE.slice(0, request.param), from_arrow_schema(table.schema)), table


PICKED = [
    "orders",
    "orders.select('data.*')",
    "orders.selectExpr('n', 'data.id', 'data.deep.n as m')",
    "orders.select('data').select('data.*').select('deep.*', 'id')",
    "orders.drop('body').withColumnRenamed('n', 'number')",
    "orders.alias('o').select('o.data.*', 'o.n')",
    "orders.withColumn('id', orders.data.id)",
]


@pytest.mark.parametrize("written", PICKED)
def test_picked_columns_are_what_spark_would_answer(origin: tuple[DataFrame, pa.Table], written: str) -> None:
    """Same rows, same order, same types, nulls inside nulls included."""
    from dedup.spark.frames import columns_of, picked

    orders, table = origin
    rows = eval(written, {"orders": orders})
    paths = picked(orders, rows)
    assert paths is not None and columns_of(table, paths).cast(arrow_of(rows).schema).equals(arrow_of(rows))


COMPUTED = [
    "orders.where('n > 1')",
    "orders.selectExpr('n + 1 as n')",
    "orders.selectExpr('data.id', 'rand() as n')",
    "orders.selectExpr('cast(n as string) as n')",
    "orders.selectExpr('explode(array(n, n)) as n')",
    "orders.selectExpr('n as a', 'body as a')",
    "orders.limit(2)",
    "orders.orderBy('body')",
    "orders.distinct()",
    "orders.union(orders)",
    "orders.join(orders.select('n'), 'n')",
    "orders.repartition(3)",
    "orders.sample(0.5, seed=1)",
    "orders.sparkSession.range(3).selectExpr('id as n')",
]


@pytest.mark.parametrize("written", COMPUTED)
def test_whatever_is_computed_is_left_to_spark(origin: tuple[DataFrame, pa.Table], written: str) -> None:
    """A plan with anything but picked columns over the whole frame is evaluated by Spark."""
    from dedup.spark.frames import picked

    orders, _ = origin
    assert picked(orders, eval(written, {"orders": orders})) is None


@pytest.mark.parametrize("parked", [[0, 3], [], range(ROWS)], ids=["some", "none", "all"])
def test_what_is_left_after_a_rejection_is_what_spark_would_answer(origin: tuple[DataFrame, pa.Table], parked: list[int]) -> None:
    """Picked without a job, again after a second rejection; columns of the handler's frame can still be named."""
    from dedup.spark.frames import SparkFrames, TableOrigin, columns_of, picked

    orders, table = origin
    frames = SparkFrames(orders.sparkSession, lambda: False, in_tasks=False)
    frames.remember(TableOrigin(orders, table))
    left = frames.without(orders, pa.table({"n": pa.array(list(parked), pa.int64())}))
    left = frames.without(left, pa.table({"n": pa.array([4], pa.int64())}))
    expected = [n for n in table["n"].to_pylist() if n not in parked and n != 4]
    rows = left.select("n", "data.*")
    last = frames.rows(rows).origins[-1]
    assert columns_of(last.table, picked(last.frame, rows))["n"].to_pylist() == expected
    assert frames.rows(rows).arrow().equals(arrow_of(rows))
    assert [row[0] for row in left.where(orders.n < 3).select(orders.n).collect()] == [n for n in expected if n < 3]


def test_the_session_keeps_its_settings(spark: SparkSession) -> None:
    """Making a frame leaves the limit of local relations as the user has set it."""
    from pyspark.sql.pandas.types import from_arrow_schema

    from dedup.spark.batch import LOCAL_BELOW, create_frame

    before = spark.conf.get(LOCAL_BELOW)
    create_frame(spark, TABLE, from_arrow_schema(TABLE.schema))
    assert spark.conf.get(LOCAL_BELOW) == before

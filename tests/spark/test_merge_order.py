"""Of several rows of one key `tx.merge` takes the last one only where Spark keeps their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from checkpoint.errors import HandlerError
from dedup.spark.features import create
from dedup.spark.ordering import keeps_order
from kit.orders import batch, consumer, event
from kit.places import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Merged = Callable[[Callable[..., None]], list[tuple[str, int]]]

LAST = [("c0", 6), ("c1", 5)]

MOVED = [
    "orders.repartition(3)",
    "orders.distinct()",
    "orders.union(orders)",
    "orders.join(orders.select('n'), 'n')",
    "orders.where('n in (select n from numbers)')",
    "orders.selectExpr('n', 'max(n) over (partition by id) as last')",
    "orders.groupBy('id').max('n')",
    "orders.limit(2)",
    "orders.sortWithinPartitions('n')",
    "orders.sparkSession.range(3)",
]

IN_ORDER = [
    "orders",
    "orders.where('n > 1').selectExpr('n + 1 as n', 'id')",
    "orders.alias('o').withColumn('m', orders.n + 1).drop('id').withColumnRenamed('m', 'k').selectExpr('o.n')",
    "orders.withColumns({'m': orders.n}).toDF('a', 'b', 'c')",
    "orders.selectExpr('explode(array(n, n)) as n')",
    "orders.repartition(3).orderBy('n').select('id')",
]


@pytest.fixture
def orders(spark: SparkSession) -> DataFrame:
    """What a handler would be given."""
    made = create(spark, pa.table({"n": [1, 2, 3], "id": ["a", "b", "a"]}))
    made.createOrReplaceTempView("numbers")
    return made


@pytest.mark.parametrize("made", MOVED)
def test_the_order_is_not_known_where_spark_moves_rows(orders: DataFrame, made: str) -> None:
    """An exchange, a window or an aggregation may come with any node that looks at other rows."""
    assert not keeps_order(eval(made, {"orders": orders}), [orders])


@pytest.mark.parametrize("made", IN_ORDER)
def test_the_order_is_known_where_each_row_is_looked_at_by_itself(orders: DataFrame, made: str) -> None:
    """So it is after a sort, which a handler asks for because of the order."""
    assert keeps_order(eval(made, {"orders": orders}), [orders])


def test_a_view_of_the_frame_has_its_order(spark: SparkSession, orders: DataFrame) -> None:
    """SQL over a temporary view is what the same calls of the frame are."""
    if not hasattr(orders, "_jdf"):
        pytest.skip("the client of Spark Connect does not know what a query is about")
    assert keeps_order(spark.sql("select id from numbers where n > 1"), [orders])


@pytest.fixture
def merged(spark: SparkSession, place: Place) -> Merged:
    """What the sink has after a batch in which the last amounts of two customers are those of LAST."""
    place.create_merge_sink("balances")

    def merge(handler: Callable[[DataFrame, Any], None]) -> list[tuple[str, int]]:
        run = consumer(place.store(), idempotence_key=None, source="broker")
        run._handler = handler
        run(create(spark, batch(*(event(n, f"c{n % 2}", n) for n in range(7)))), 0)
        return sorted((row["id"], row["amount"]) for row in place.read("balances"))

    return merge


@pytest.mark.parametrize("made", ["orders.repartition(3).select('data.*')", "orders.select('data.*').join(customers, 'id')"])
def test_rows_of_one_key_that_spark_moved_are_refused(merged: Merged, spark: SparkSession, made: str) -> None:
    """Whichever of them came last would be chance: the handler is told what to do, in a small batch as in a large one."""
    customers = spark.createDataFrame([("c0",), ("c1",)], "id string")
    with pytest.raises(HandlerError, match=r"position columns.*newer_by=.*one row of each key"):
        merged(lambda orders, tx: tx.merge(eval(made, {"orders": orders, "customers": customers}), "balances", keys="id"))


@pytest.mark.parametrize(
    "made",
    [
        "orders.where('data.amount > 0').select('data.*')",
        "tx.reject(orders.selectExpr('*', 'data.*'), 'data.amount = 0', 'zero').selectExpr('id', 'amount + 0 as amount')",
        "orders.repartition(3).select('source', 'topic', 'partition', 'sequence_number', 'part', 'data.*')",
        "orders.select('data.*').repartition(3).toArrow().sort_by('amount')",
        "[row.data for row in orders.collect()]",
    ],
)
def test_rows_that_have_an_order_are_merged(merged: Merged, made: str) -> None:
    """Filtered rows, those that a rejection leaves, those with their positions, and rows of Python: the last one of each key counts."""
    assert merged(lambda orders, tx: tx.merge(eval(made, {"orders": orders, "tx": tx}), "balances", keys="id")) == LAST


def test_one_row_of_each_key_needs_no_order(merged: Merged) -> None:
    """A handler that aggregates merges what it made, whatever Spark did with its rows."""
    assert merged(lambda orders, tx: tx.merge(totals(orders), "balances", keys="id")) == [("c0", 12), ("c1", 9)]


@pytest.mark.full
def test_a_column_that_tells_which_row_is_newer_needs_no_order(merged: Merged) -> None:
    """With `newer_by` the greatest value counts, whatever Spark did with the rows."""
    assert merged(lambda orders, tx: tx.merge(orders.select("data.*").repartition(3), "balances", keys="id", newer_by="amount")) == LAST


def totals(orders: DataFrame) -> DataFrame:
    """The amounts of each customer."""
    return orders.select("data.*").groupBy("id").sum("amount").toDF("id", "amount")

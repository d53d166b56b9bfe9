"""The state of a Delta store as temporary views, for people who ask in SQL. Reads only."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dedup.rows import for_spark
from dedup.store import Head, Selection, Store

CHECKPOINTS = pa.schema(
    [
        pa.field("consumer", pa.string()),
        pa.field("source", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("sequence_number", pa.int64()),
        pa.field("offset", pa.string()),
        pa.field("enqueued_time", pa.timestamp("us", tz="UTC")),
        pa.field("query_id", pa.string()),
        pa.field("epoch", pa.int64()),
        pa.field("generation", pa.int32()),
    ]
)


def create(store: Store, ledgers: dict[str, str], more: dict[str, pa.Table], spark: SparkSession) -> Iterator[str]:
    """Create the views; yields their names.

    Args:
        more: views that are given as tables.
        ledgers: consumer -> URI of its ledger. Reservations are read from there when the view is queried; the rest is as of now.
    """
    heads = [store.head(name) for name in ledgers]
    rows = [row for head in heads for row in _checkpoints(head)]
    yield _view(_frame(spark, pa.Table.from_pylist(rows, schema=CHECKPOINTS)), "dedup_checkpoints")
    batches = [store.batches(name) for name in ledgers]
    named = [b.add_column(0, "consumer", pa.repeat(name, b.num_rows)) for name, b in zip(ledgers, batches, strict=True)]
    for name, table in more.items():
        yield _view(_frame(spark, table), name)
    if named:
        yield _view(_frame(spark, pa.concat_tables(named)), "dedup_batches")
        yield _view(_frame(spark, store.letters(Selection(limit=None))), "dedup_dead_letters")
        parts = [_reservations(spark, name, uri) for name, uri in ledgers.items()]
        yield _view(reduce(DataFrame.unionAll, parts), "dedup_reservations")


def _view(frame: DataFrame, name: str) -> str:
    frame.createOrReplaceTempView(name)
    return name


def _frame(spark: SparkSession, table: pa.Table) -> DataFrame:
    """Spark knows no fixed-size bytes."""
    fields = [pa.field(f.name, pa.binary() if pa.types.is_fixed_size_binary(f.type) else f.type) for f in table.schema]
    return spark.createDataFrame(for_spark(table.cast(pa.schema(fields))))


def _checkpoints(head: Head) -> Iterator[dict[str, object]]:
    for partition, point in head.checkpoints.items():
        told = {"consumer": head.consumer, "epoch": head.epoch, "generation": head.generation}
        yield {**told, **partition._asdict(), **vars(point)}


def _reservations(spark: SparkSession, consumer: str, uri: str) -> DataFrame:
    """Those that no later decision freed."""
    ledger = spark.read.format("delta").load(uri if "://" in uri else f"file://{uri}")
    freed = ledger.where("kind = 'freed'").groupBy("key").agg(F.max("seq").alias("freed_in"))
    kept = ledger.where("kind = 'reservation'").join(F.broadcast(freed), "key", "left").where("freed_in IS NULL OR seq >= freed_in")
    return kept.select(F.lit(consumer).alias("consumer"), "seq", "key", "payload_hash", F.expr("section = 'held'").alias("held"), "day")

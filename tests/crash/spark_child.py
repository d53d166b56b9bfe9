"""`python -m crash.spark_child TASK`: the consumer in a Structured Streaming query, to be broken. Reads the landing folder to its end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from orders import consumer

from crash import log
from crash.child import SINKS, place_of
from dedup.demo.delivery import ENVELOPE_DDL


def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """As they are, by way of a Python worker that takes its time."""
    for each in batches:
        time.sleep(0.2)
        yield each


def handle(rows: Any, tx: Any, started: Path) -> None:
    """What crash.child does to Arrow tables, to DataFrames; nothing is rejected at random."""
    from pyspark.sql import functions as F

    started.touch()
    rest = tx.reject(rows, "data.amount < 0", "negative")
    flat = rest.select("data.id", "data.amount", "partition", "sequence_number").mapInArrow(
        slowly, "id string, amount bigint, partition int, sequence_number bigint"
    )
    for name in SINKS:
        tx.write(flat.select("id", "amount"), name)
    number = log.PARTITIONS * (F.col("sequence_number") / 2).cast("bigint") + F.col("partition") + 1
    account = F.concat(F.lit("b"), (F.crc32(F.col("id").cast("binary")) % 5).cast("string"))
    tx.merge(flat.select(account.alias("id"), number.cast("bigint").alias("amount")), "balances", ["id"], newer_by="amount")


def main() -> None:
    """One life of a driver."""
    from dedup.spark.session import local_session

    task = json.loads(sys.argv[1])
    folder, spark = Path(task["folder"]), local_session("crash")
    store = place_of(task["kind"], task["place"]).store()
    run = consumer(store, max_events_per_transaction=8, takeover_after=1.0, max_outage=task["patience"], budget=None, query=None)
    run._handler = lambda rows, tx: handle(rows, tx, Path(task["started"]))
    events = spark.readStream.schema(ENVELOPE_DDL).option("maxFilesPerTrigger", 1).parquet(str(folder / "landing"))
    query = events.writeStream.foreachBatch(run).option("checkpointLocation", str(folder / "spark"))
    query.trigger(availableNow=True).start().awaitTermination()
    store.publish("shop")
    store.close()


if __name__ == "__main__":
    main()

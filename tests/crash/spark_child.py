"""`python -m crash.spark_child [CONF]`: the consumer in Structured Streaming queries, to be broken; with CONF on a cluster.

Each line on stdin is a task: a query that reads its log to the end. Answers how it ended.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from crash import jvm_calls, log
from crash.child import SINKS, handle_one, place_of
from crash.drivers import ANSWER, DONE
from dedup.demo.input import ENVELOPE_DDL
from kit import cluster_driver
from kit.orders import consumer


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
    names = ["source", "topic", "partition", "sequence_number", "part"]
    flat = rest.select("data.id", "data.amount", *names)
    flat = flat.mapInArrow(slowly, flat.schema)
    for name in SINKS:
        tx.write(flat.select("id", "amount"), name)
    number = (F.col("sequence_number") / 2).cast("bigint")
    mark = (log.PARTITIONS * number + F.col("partition") + 1).cast("bigint").alias("amount")
    account = F.concat(F.lit("b"), (F.crc32(F.col("id").cast("binary")) % 5).cast("string")).alias("id")
    tx.merge(flat.select(account, mark), "balances", ["id"], newer_by="amount")
    seat = F.concat_ws("-", "partition", number % 3).alias("id")
    tx.merge(flat.select(seat, mark, (mark % 4 == 0).alias("leaves"), *names), "latest", ["id"], delete_when="leaves")


def silently(rows: Any, tx: Any, started: Path) -> None:
    """The same, by somebody who keeps to himself what went wrong."""
    with contextlib.suppress(Exception):
        return handle(rows, tx, started)
    raise ValueError("this event cannot be handled")


def handle_slowly(event: Any, tx: Any, started: Path) -> None:
    """One event, in a task of Spark."""
    started.touch()
    time.sleep(0.03)
    handle_one(event, tx)


def stream(spark: Any, task: dict[str, Any]) -> Any:
    """The log as a stream: files, one a batch, or a topic, a few offsets a batch."""
    if "landing" in task:
        return spark.readStream.schema(ENVELOPE_DDL).option("maxFilesPerTrigger", 1).parquet(task["landing"])
    options = {"kafka.bootstrap.servers": task["servers"], "subscribe": task["topic"], "startingOffsets": "earliest"}
    limits = {"kafka.isolation.level": "read_committed", "maxOffsetsPerTrigger": str(2 * log.PARTITIONS * log.BATCH)}
    return spark.readStream.format("kafka").options(**options, **limits).load()


def query(spark: Any, task: dict[str, Any]) -> None:
    """One life of a query."""
    store: Any = place_of(task["kind"], task["place"]).store()
    source = None if "landing" in task else "broker"
    settings = {"max_events_per_transaction": 8, "takeover_after": 1.0, "budget": None, "query": None, "source": source}
    run = consumer(store, max_outage=task["patience"], takeover=task["takeover"], **settings)
    started = Path(task["started"])
    if at := task.get("jvm_dies_at"):
        jvm_calls.kill_at(at, started)
    elif at == 0:
        jvm_calls.kill_soon(started)
    if task["in_tasks"]:
        run._handler = None
        run.foreach()(partial(handle_slowly, started=started))
    else:
        run._handler = partial(silently if task.get("tells_nothing") else handle, started=started)
    try:
        writer = stream(spark, task).writeStream.foreachBatch(run).option("checkpointLocation", task["query"])
        writer.trigger(availableNow=True).start().awaitTermination()
        store.publish("shop")
    finally:
        store.close()


def session() -> Any:
    """With Kafka's source, without asking Ivy at each start, and without the compiler that pays for long lives alone."""
    from dedup.spark import session as sessions
    from kit import maven

    _, artifact, version = sessions.DELTA.split(":")
    cached = sorted(Path(sessions._jars(), "jars").glob(f"io.delta_*-{version}.jar"))  # beside those for other versions of Spark
    delta = [jar for jar in cached if "_delta-spark_" not in jar.name or f"_{artifact}-" in jar.name]
    conf = {"spark.jars": ",".join([maven.spark_kafka(), *map(str, delta)]), "spark.driver.memory": "1g"}
    if delta:
        conf["spark.jars.packages"] = ""
    conf["spark.driver.extraJavaOptions"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    return sessions.local_session("crash", **conf)


def main() -> None:
    """One task after the other, until nobody gives one or the JVM is gone."""
    spark = cluster_driver.session(json.loads(sys.argv[1])) if len(sys.argv) > 1 else session()
    for line in sys.stdin:
        task = json.loads(line)
        try:
            query(spark, task)
            print(ANSWER + DONE, flush=True)
        except Exception as error:  # noqa: BLE001 - whatever it is: it is told by its name
            print(f"--- {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            time.sleep(task.get("lingers", 0.0))
            spark.range(1).collect()  # whoever lost its JVM ends here, as whoever is killed: without an answer
            print(ANSWER + type(error).__name__, flush=True)


if __name__ == "__main__":
    main()

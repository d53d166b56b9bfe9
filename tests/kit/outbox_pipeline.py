"""The processes of test_outbox_pipeline.py, to be killed: they run until a file says that it is enough, runners until a signal does.

As a program, `python -m kit.outbox_pipeline '{...}'`, it is the first consumer as a Spark query.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from checkpoint.errors import IncarnationChanged, SourceUnavailable
from checkpoint.position import Partition
from dedup import Consumer, PostgresStore, Takeover
from dedup.core.envelope import POSITION
from dedup.outbox import Dispatcher, ExactlyOnce, Patience
from kit.grouped import grouped

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])
PAGE = 4_000


def rows_of(events: pa.Table) -> pa.Table:
    """What is written of an event."""
    return pa.table([events["key"].cast(pa.string()), events["body"].cast(pa.string()).cast(pa.int64())], schema=SCHEMA)


def consumer_of(task: dict[str, Any], **settings: Any) -> Consumer:
    """The first consumer writes each event and sends it on, the last one only writes."""
    made = Consumer(task["name"], PostgresStore(task["dsn"]), **grouped(**settings))

    @made.foreach_batch
    def handle(events: pa.Table, tx: Any) -> None:
        tx.write(rows_of(events), task["name"])
        if task["name"] == "first":
            tx.publish(events.select([*POSITION, "key", "body"]), task["out"], key="key", order="part")

    return made


def consume(task: dict[str, Any]) -> None:
    """A consumer that reads a topic behind its own checkpoints, page by page."""
    from dedup.kafka import Broker, log_reader

    consumer, broker = consumer_of(task, query="q", takeover=True, key_scope="consumer"), Broker(task["servers"])
    store, read = consumer.store, log_reader(broker)
    while not Path(task["until"]).exists():
        head = store.head(task["name"])
        points = {p: c.sequence_number for p, c in head.checkpoints.items()}
        pages = []
        with suppress(IncarnationChanged, SourceUnavailable):  # a transaction is open there, or the machine is busy: look again
            for (topic, number), (begin, end) in broker.spans([task["topic"]]).items():
                start = max(points.get(Partition("kafka", topic, number), -1) + 1, begin)
                if start < end:
                    pages.append(read.read(topic, number, start, min(end, start + PAGE) - 1))
        if any(page.num_rows for page in pages):
            consumer(pa.concat_tables(pages), 0 if head.batch_id is None else head.batch_id + 1)
        else:
            time.sleep(0.05)


def run_on_hub(task: dict[str, Any]) -> None:
    """A runner on an event hub."""
    from dedup.eventhub import run

    quick = {"balance_every": 0.5, "expire_after": 3.0, "max_events": task["batch"], "max_wait": 0.1, "retry_backoff_factor": 0.1}
    run(consumer_of(task, takeover_after=2.0), task["hubs"], task["topic"], **quick)


def dispatch(task: dict[str, Any]) -> None:
    """A dispatcher."""
    stop = threading.Event()

    def wait() -> None:
        while not Path(task["until"]).exists():
            time.sleep(0.05)
        stop.set()

    threading.Thread(target=wait, daemon=True).start()
    _dispatcher(task, PostgresStore(task["dsn"]).outbox("first")).run(stop, every=0.05)


def _dispatcher(task: dict[str, Any], outbox: Any) -> Dispatcher:
    if "hubs" in task:
        from dedup.eventhub import Connection, SendingHubs

        hubs = SendingHubs(Connection.of(task["hubs"], hub="any"), retry_backoff_factor=0.05)
        return Dispatcher(outbox, hubs, limit=2_000, patience=Patience(most=1.0))
    from dedup.kafka import Topics, TransactionalTopics

    if task.get("exactly_once"):
        return ExactlyOnce(outbox, TransactionalTopics(task["servers"], "first", timeout=20.0), limit=500)
    return Dispatcher(outbox, Topics(task["servers"]), limit=2_000, patience=Patience(most=1.0))


def spark_query(task: dict[str, Any]) -> None:
    """The first consumer in a Spark query: a DataFrame is written and published for each batch, until all that is there now is done."""
    from pyspark.sql import functions as F

    from dedup.spark.session import local_session
    from kit import maven

    spark = local_session("to be killed", **{"spark.jars": maven.spark_kafka()})
    made = Consumer("first", PostgresStore(task["dsn"]), takeover=Takeover(after=2.0))

    @made.foreach_batch
    def handle(events: Any, tx: Any) -> None:
        tx.write(events.select(F.col("key").cast("string").alias("k"), F.col("body").cast("string").cast("long").alias("n")), "first")
        tx.publish(events.select(*POSITION, "key", "body").repartition(3, "sequence_number"), task["out"], key="key", order="part")

    options = {"kafka.bootstrap.servers": task["servers"], "subscribe": task["topic"], "startingOffsets": "earliest"}
    frame = spark.readStream.format("kafka").options(**options, maxOffsetsPerTrigger=str(task["batch"])).load()
    made.run(frame.writeStream.option("checkpointLocation", task["checkpoint"]).trigger(availableNow=True))


def main(task: dict[str, Any]) -> None:
    """What the task says; `look`: seconds for which the number of a hub's partitions is believed."""
    if "look" in task:
        from dedup.eventhub import outbox, runner

        outbox.LOOK_SECONDS = runner.LOOK_SECONDS = task["look"]
    {"consume": consume, "run": run_on_hub, "dispatch": dispatch}[task["do"]](task)


if __name__ == "__main__":
    spark_query(json.loads(sys.argv[1]))

"""Real events in a real Kafka topic, some of them twice because a producer retried, and the stream over them as a program to kill.

Online Retail where it is there, else flights: each row is one event, the whole row its key. `python -m kit.kafka_retail INPUT SERVERS
TOPIC FOLDER STORE EVENTS_PER_BATCH` is the stream.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from dedup import Consumer, DeltaStore, PostgresStore, decode, kafka
from dedup.core.store import Store
from dedup.demo import input
from dedup.urls import is_postgres
from kit import maven, retail
from kit.kafka_kit import Topic, flush
from kit.kafka_proxy import Proxy

CONSUMER = SINK = "lines"
PARTITIONS = 4
LOST = 10
"""Answers of the broker that are lost."""

BATCHES = 10
"""Of the stream, about."""


@dataclass(frozen=True)
class Input:
    """Rows of text."""

    schema: pa.Schema
    checks: dict[str, str]

    @classmethod
    def named(cls, name: str) -> Input:
        """Of this name: retail or flights."""
        if name == "retail":
            return cls(retail.ROW, retail.CHECKS)
        return cls(pa.schema([pa.field(f.name, pa.string()) for f in input.FLIGHT]), {})

    def rows(self, data: Path, events: int) -> pa.Table:
        """The first so many."""
        table = pa.concat_tables(retail.read(data)) if self.checks else input.read(events)
        return table.slice(0, events).cast(self.schema)

    def expected(self, rows: pa.Table) -> pa.Table:
        """The distinct good rows, by pyarrow alone."""
        return retail.expected([rows]) if self.checks else distinct(rows)


def distinct(rows: pa.Table) -> pa.Table:
    """Each row once."""
    return rows.group_by(rows.column_names).aggregate([]).select(rows.column_names)


def produce(rows: pa.Table, topic: Topic, proxy: Proxy) -> None:
    """Send them, each partition in order, by a producer that retries and is not idempotent; answers are lost on the way."""
    producer = topic.producer(**{"bootstrap.servers": proxy.servers, "retry.backoff.ms": 10, "queue.buffering.max.messages": 1_000_000})
    every = rows.num_rows // LOST
    for number, row in enumerate(rows.to_pylist()):
        if number % every == every // 2:
            flush(producer)
            proxy.arm()
        producer.produce(topic.name, json.dumps(row).encode(), partition=number % PARTITIONS)
    flush(producer)


def opened(url: str) -> Store:
    """The store at this place: a DSN, or a folder with the sink beside the state."""
    return PostgresStore(url) if is_postgres(url) else DeltaStore(f"{url}/dedup", tables={SINK: f"{url}/{SINK}"})


def stream(spark: Any, source: Input, servers: str, topic: str, folder: Path, store: Store, per_batch: int) -> None:
    """Stream the topic to its end; continue where the Spark checkpoint stands."""
    broker = kafka.Broker(servers)
    key = [f"data.{name}" for name in source.schema.names]
    who = {"source": broker.cluster_id(), "incarnation": broker.topic_ids}
    consumer = Consumer(CONSUMER, store, idempotence_key=key, decode=decode.json(source.schema), **who)

    @consumer.foreach_batch
    def load(lines: Any, tx: Any) -> None:
        for reason, condition in source.checks.items():
            lines = tx.reject(lines, condition, reason)
        tx.write(lines.select("data.*"), SINK)

    options = {
        "kafka.bootstrap.servers": servers,
        "subscribe": topic,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": str(per_batch),
    }
    events = spark.readStream.format("kafka").options(**options, includeHeaders="true").load()
    writer = events.writeStream.foreachBatch(consumer).option("checkpointLocation", str(folder / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()


def main(name: str, servers: str, topic: str, folder: Path, store: str, per_batch: int) -> None:
    """The stream as a program of its own."""
    from dedup.spark.session import local_session

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    spark = local_session("kafka", **{"spark.jars": maven.spark_kafka()})
    stream(spark, Input.named(name), servers, topic, folder, opened(store), per_batch)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5], int(sys.argv[6]))

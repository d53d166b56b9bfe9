"""Online Retail in an event hub, and the stream over it as a program to kill: `python -m kit.hub_retail CONNECTION FOLDER STORE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
from azure.eventhub import EventData, EventHubProducerClient

from dedup import Consumer, DeltaStore, PostgresStore, decode
from dedup.core.store import Store
from dedup.urls import is_postgres
from kit import retail
from kit.retail import CHECKS, COLUMNS, CONSUMER, SINK

HUB, PARTITIONS = "retail", 4
AT_ONCE = 1_000
LOST_EVERY = 25
"""Batches after which an answer of the service is lost: the client sends that batch again."""


def produce(double: Any, rows: pa.Table) -> int:
    """Send all rows by the real client, in batches, some of which it repeats. Gives how many events are there twice."""
    double.create(HUB, PARTITIONS)
    repeated = 0
    with EventHubProducerClient.from_connection_string(double.connection_string, eventhub_name=HUB, retry_backoff_factor=0.01) as client:
        for number, first in enumerate(range(0, rows.num_rows, AT_ONCE)):
            events = [EventData(json.dumps(row).encode()) for row in rows.slice(first, AT_ONCE).to_pylist()]
            if number % LOST_EVERY == LOST_EVERY // 2:
                double.order("lose_answers", count=1)
                repeated += len(events)
            client.send_batch(events, partition_id=str(number % PARTITIONS))
    return repeated


def opened(url: str) -> Store:
    """The store at this place: a DSN, or a folder with the sink beside the state."""
    return PostgresStore(url) if is_postgres(url) else DeltaStore(f"{url}/dedup", tables={SINK: f"{url}/{SINK}"})


def stream(spark: Any, connection: str, folder: Path, store: Store) -> None:
    """Stream the hub to its end; continue where the Spark checkpoint stands."""
    from dedup.eventhub import register

    consumer = Consumer(CONSUMER, store, idempotence_key=[f"data.{name}" for name in COLUMNS], decode=decode.json(retail.ROW))

    @consumer.foreach_batch
    def load(lines: Any, tx: Any) -> None:
        for reason, condition in CHECKS.items():
            lines = tx.reject(lines, condition, reason)
        tx.write(lines.select("data.*"), SINK)

    register(spark)
    options = {"connectionString": connection, "eventHubName": HUB, "maxEventsPerTrigger": "25000"}
    events = spark.readStream.format("eventhubs").options(**options).load()
    consumer.run(events.writeStream.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True))


if __name__ == "__main__":
    from dedup.spark.session import local_session

    stream(local_session("retail"), sys.argv[1], Path(sys.argv[2]), opened(sys.argv[3]))

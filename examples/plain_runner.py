"""Orders from an event hub into a table of PostgreSQL, without Spark.

    create table orders (order_id text, customer text, amount bigint)

Start any number of processes, on any number of machines: they share the partitions. SIGTERM ends a process.
Messages are JSON and carry AMQP's message id. Settings: DEDUP_STORE (a DSN), EVENTHUBS (a connection string), HUB.
"""

import logging
import os

import pyarrow as pa

from dedup import Consumer, PostgresStore, decode
from dedup.eventhub import run

ORDER = pa.schema([("order_id", pa.string()), ("customer", pa.string()), ("amount", pa.int64())])

consumer = Consumer(
    "orders",
    PostgresStore(os.environ["DEDUP_STORE"]),
    idempotence_key="message_id",
    decode=decode.json(ORDER),
)


@consumer.foreach(into="orders")
def store_order(event, tx):
    """Return a row to write it. An order with a negative amount becomes a dead letter, and the stream goes on."""
    if event.data["amount"] < 0:
        return tx.dead_letter(event, "negative amount")
    return event.data


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    run(consumer, os.environ["EVENTHUBS"], os.environ.get("HUB", "orders"))

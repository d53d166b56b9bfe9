"""Orders from a Kafka topic into a table of PostgreSQL, until it is stopped: what two of the manifests in this folder run.

    create table orders (order_id text, customer text, amount bigint)

Messages are JSON and carry their id in the header `message-id`. Settings: DEDUP_STORE (a DSN; libpq takes the password from PGPASSWORD),
BROKER, TOPIC, SHARED (a folder for Spark's checkpoint and large batches; driver and executors share it).
"""

import logging
import os

import pyarrow as pa
from pyspark.sql import SparkSession

from dedup import Consumer, FailurePolicy, Limits, PostgresStore, decode, kafka, logs

BROKER = os.environ["BROKER"]
TOPIC = os.environ.get("TOPIC", "orders")
SHARED = os.environ["SHARED"]
ORDER = pa.schema([("order_id", pa.string()), ("customer", pa.string()), ("amount", pa.int64())])

broker = kafka.Broker(BROKER)
consumer = Consumer(
    "orders",
    PostgresStore(os.environ["DEDUP_STORE"]),
    source=broker.cluster_id(),
    incarnation=broker.topic_ids,
    idempotence_key="message_id",
    decode=decode.json(ORDER),
    failure=FailurePolicy(handler_timeout=600),  # a handler that hangs ends the process, and Kubernetes starts another one
    limits=Limits(scratch=f"{SHARED}/scratch"),
)


@consumer.foreach_batch
def store_orders(orders, tx):
    """Reject refunds, write the other orders."""
    good = tx.reject(orders, "data.amount < 0", "negative amount")
    tx.write(good.select("data.*"), "orders")


def main():
    """Run until SIGTERM. Where Spark's checkpoint is gone, the stream begins after dedup's own."""
    spark = SparkSession.builder.appName("orders").getOrCreate()
    events = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", BROKER)
        .option("subscribe", TOPIC)
        .option("startingOffsets", consumer.starting_offsets(broker, TOPIC))
        .option("includeHeaders", "true")
        .option("kafka.isolation.level", "read_committed")
        .option("maxOffsetsPerTrigger", 100_000)
        .load()
    )
    writer = events.writeStream.option("checkpointLocation", f"{SHARED}/checkpoint")
    consumer.run(writer.trigger(processingTime="5 seconds"))


if __name__ == "__main__":
    logging.basicConfig(level="INFO", handlers=[logs.json_lines()])
    logging.getLogger("py4j").setLevel("WARNING")
    main()

"""Orders from a Kafka topic into a table of PostgreSQL, each message once.

    create table orders (order_id text, customer text, amount bigint)

Messages are JSON and carry their id in the header `message-id`. Settings: DEDUP_STORE (a DSN), BROKER, TOPIC, SPARK_CHECKPOINT.
"""

import os

import pyarrow as pa
from pyspark.sql import SparkSession

from dedup import Consumer, PostgresStore, decode, kafka

BROKER = os.environ.get("BROKER", "localhost:9092")
TOPIC = os.environ.get("TOPIC", "orders")
ORDER = pa.schema([("order_id", pa.string()), ("customer", pa.string()), ("amount", pa.int64())])

broker = kafka.Broker(BROKER)
consumer = Consumer(
    "orders",
    PostgresStore(os.environ["DEDUP_STORE"]),
    source=broker.cluster_id(),
    incarnation=broker.topic_ids,  # a topic that was deleted and created again is refused
    idempotence_key="message_id",
    decode=decode.json(ORDER),
)
consumer.register_log_reader(kafka.log_reader(broker))  # `dedup consumer replay` reads positions again


@consumer.foreach_batch
def store_orders(orders, tx):
    """Reject refunds, write the other orders."""
    good = tx.reject(orders, "data.amount < 0", "negative amount")
    tx.write(good.select("data.*"), "orders")


def main():
    """Handle what is in the topic, then end. Without the trigger the stream goes on until it is stopped."""
    spark = SparkSession.builder.getOrCreate()
    events = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", BROKER)
        .option("subscribe", TOPIC)
        .option("startingOffsets", consumer.starting_offsets(broker, TOPIC))
        .option("includeHeaders", "true")
        .option("kafka.isolation.level", "read_committed")
        .load()
    )
    checkpoint = os.environ.get("SPARK_CHECKPOINT", "spark-checkpoint/orders")
    consumer.run(events.writeStream.option("checkpointLocation", checkpoint).trigger(availableNow=True))


if __name__ == "__main__":
    main()

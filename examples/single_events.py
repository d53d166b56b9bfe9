"""One event at a time, in Spark's tasks: payments from a Kafka topic into a table of PostgreSQL.

    create table payments (payment_id text, account text, cents bigint)

Messages are JSON and carry their id in the header `message-id`. Settings: DEDUP_STORE (a DSN), BROKER, TOPIC, SPARK_CHECKPOINT.
"""

import os
from decimal import Decimal

import pyarrow as pa
from pyspark.sql import SparkSession

from dedup import Consumer, PostgresStore, decode, kafka

BROKER = os.environ.get("BROKER", "localhost:9092")
TOPIC = os.environ.get("TOPIC", "payments")
PAYMENT = pa.schema([("payment_id", pa.string()), ("account", pa.string()), ("euros", pa.string())])

broker = kafka.Broker(BROKER)
consumer = Consumer(
    "payments",
    PostgresStore(os.environ["DEDUP_STORE"]),
    source=broker.cluster_id(),
    incarnation=broker.topic_ids,
    idempotence_key="message_id",
    sequence_key="data.account",  # if a payment becomes a dead letter, later payments of that account wait
    decode=decode.json(PAYMENT),
)


@consumer.foreach(into="payments")
def store_payment(event, tx):
    """Return a row to write it, return None to skip the event; an event for which this raises becomes a dead letter."""
    payment = event.data
    cents = Decimal(payment["euros"]) * 100
    if cents == 0:
        return None
    if cents < 0:
        return tx.dead_letter(event, "negative amount")
    return {"payment_id": payment["payment_id"], "account": payment["account"], "cents": cents}


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
    checkpoint = os.environ.get("SPARK_CHECKPOINT", "spark-checkpoint/payments")
    consumer.run(events.writeStream.option("checkpointLocation", checkpoint).trigger(availableNow=True))


if __name__ == "__main__":
    main()

"""The newest state of each customer, from a Kafka topic into a Delta table, by merge.

Messages are JSON and carry their id in the header `message-id`. Settings: BROKER, TOPIC, LAKE (a folder that driver and executors share).
"""

import os

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from dedup import Consumer, DeltaStore, decode, kafka

BROKER = os.environ.get("BROKER", "localhost:9092")
TOPIC = os.environ.get("TOPIC", "customers")
LAKE = os.environ.get("LAKE", "/tmp/lake")
CHANGE = pa.schema([("customer", pa.string()), ("city", pa.string()), ("version", pa.int64()), ("gone", pa.bool_())])
CUSTOMER = pa.schema([("customer", pa.string()), ("city", pa.string()), ("version", pa.int64())])

broker = kafka.Broker(BROKER)
consumer = Consumer(
    "customers",
    DeltaStore(f"{LAKE}/dedup"),
    source=broker.cluster_id(),
    incarnation=broker.topic_ids,
    idempotence_key="message_id",
    decode=decode.json(CHANGE),
)


@consumer.foreach_batch
def merge_customers(changes, tx):
    """Insert or update by customer. A change that is older than the row changes nothing; `gone` deletes the row."""
    rows = changes.selectExpr("data.customer", "data.city", "data.version", "coalesce(data.gone, false) as gone")
    tx.merge(rows, f"{LAKE}/customers", keys="customer", newer_by="version", delete_when="gone")


def main():
    """Handle what is in the topic, then end. Without the trigger the stream goes on until it is stopped."""
    DeltaTable.create(f"{LAKE}/customers", schema=CUSTOMER, mode="ignore")
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
    consumer.run(events.writeStream.option("checkpointLocation", f"{LAKE}/spark").trigger(availableNow=True))


if __name__ == "__main__":
    main()

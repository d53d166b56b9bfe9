"""Orders from a Kafka topic into PostgreSQL, and for each stored order one message to another topic.

    create table orders (order_id text, customer text, amount bigint)

Messages are JSON and carry their id in the header `message-id`. Settings: DEDUP_STORE (a DSN), BROKER, TOPIC, MAILS, SPARK_CHECKPOINT.
"""

import os

import pyarrow as pa
from pyspark.sql import SparkSession

from dedup import Consumer, PostgresStore, decode, kafka

BROKER = os.environ.get("BROKER", "localhost:9092")
TOPIC = os.environ.get("TOPIC", "orders")
MAILS = os.environ.get("MAILS", "mails")
ORDER = pa.schema([("order_id", pa.string()), ("customer", pa.string()), ("amount", pa.int64())])

broker = kafka.Broker(BROKER)
consumer = Consumer(
    "order-mails",
    PostgresStore(os.environ["DEDUP_STORE"]),
    source=broker.cluster_id(),
    incarnation=broker.topic_ids,
    idempotence_key="message_id",
    decode=decode.json(ORDER),
)
consumer.dispatch_to(kafka.Topics(BROKER))  # after each batch; `dedup outbox dispatch` sends what is left


@consumer.foreach(into="orders")
def store_order(event, tx):
    """Store the order and its message in one transaction. The message has one id, however often it is sent."""
    order = event.data
    tx.publish({"to": order["customer"], "body": f"We have your order {order['order_id']}."}, MAILS, key="to")
    return order


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
    checkpoint = os.environ.get("SPARK_CHECKPOINT", "spark-checkpoint/order-mails")
    consumer.run(events.writeStream.option("checkpointLocation", checkpoint).trigger(availableNow=True))


if __name__ == "__main__":
    main()

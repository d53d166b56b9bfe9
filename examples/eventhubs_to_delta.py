"""Orders from an event hub into a Delta table, each message once.

Messages are JSON and carry AMQP's message id.
Settings: EVENTHUBS (a connection string), HUB, LAKE (a folder that driver and executors share).
"""

import os

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from dedup import Consumer, DeltaStore, decode
from dedup.eventhub import log_reader, register, starting_positions

HUB = os.environ.get("HUB", "orders")
CONNECTION = f"{os.environ['EVENTHUBS']};EntityPath={HUB}"
LAKE = os.environ.get("LAKE", "/tmp/lake")
ORDER = pa.schema([("order_id", pa.string()), ("customer", pa.string()), ("amount", pa.int64())])

consumer = Consumer("orders", DeltaStore(f"{LAKE}/dedup"), idempotence_key="message_id", decode=decode.json(ORDER))
consumer.register_log_reader(log_reader(CONNECTION, group="again"))  # `dedup consumer replay` reads with a consumer group of its own


@consumer.foreach_batch
def store_orders(orders, tx):
    """Reject refunds, write the other orders."""
    good = tx.reject(orders, "data.amount < 0", "negative amount")
    tx.write(good.select("data.*"), f"{LAKE}/orders")


def main():
    """Handle what is in the hub, then end. Without the trigger the stream goes on until it is stopped."""
    DeltaTable.create(f"{LAKE}/orders", schema=ORDER, mode="ignore")
    spark = SparkSession.builder.getOrCreate()
    register(spark)
    events = (
        spark.readStream.format("eventhubs")
        .option("connectionString", CONNECTION)
        .option("startingPositions", starting_positions(consumer, CONNECTION))
        .option("maxEventsPerTrigger", 100_000)
        .load()
    )
    consumer.run(events.writeStream.option("checkpointLocation", f"{LAKE}/spark").trigger(availableNow=True))


if __name__ == "__main__":
    main()

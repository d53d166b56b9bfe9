"""A Spark stream of orders from an event hub into a store; as a program, one that may be killed: `python -m kit.hub_stream '{...}'`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dedup import Consumer, decode
from kit.grouped import grouped
from kit.orders import ORDER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def consumer(store: Any, **settings: Any) -> Consumer:
    """Each order into the sink `orders`, negative amounts parked."""
    made = Consumer(
        "shop", store, **grouped(**{"idempotence_key": "data.id", "decode": decode.json(ORDER), "takeover_after": 2.0, **settings})
    )

    @made.foreach_batch
    def load(rows: DataFrame, tx: Any) -> None:
        tx.write(tx.reject(rows, "data.amount < 0", "negative amount").select("data.*"), "orders")

    return made


def run(spark: SparkSession, options: dict[str, str], made: Consumer, checkpoint: Path) -> None:
    """Everything that is there now."""
    from dedup.eventhub import register

    register(spark)
    frame = spark.readStream.format("eventhubs").options(**options).load()
    made.run(frame.writeStream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True))


if __name__ == "__main__":
    from dedup.spark.session import local_session
    from kit.places import place_of

    task = json.loads(sys.argv[1])
    place = place_of(task["kind"], task["place"])
    run(local_session("killed"), task["options"], consumer(place.store()), Path(task["checkpoint"]))

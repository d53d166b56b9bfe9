"""The program that gets killed: an ordinary Structured Streaming query with one consumer, as anybody would write it.

Run as a child of main.py: `python -m dedup.demo.driver`. Ends when the landing folder is read.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

from dedup import Consumer, decode
from dedup.demo.input import ENVELOPE_DDL, FLIGHT, NO_DEPARTURE
from dedup.demo.places import CONSUMER, DemoTarget, target
from dedup.process import leave

STORE = "DEDUP_DEMO_STORE"
"""Variable with the store as `dedup demo --store` was given it; empty for the default."""


def stream(spark: Any, folder: Path, place: DemoTarget, checkpoint: str = "spark-checkpoint") -> None:
    """Read the landing folder to its end, one file a batch; continue where the Spark checkpoint stands.

    Crash: at any moment; starting it again is all that is needed.
    """
    with closing(place.store()) as store:
        consumer = Consumer(CONSUMER, store=store, idempotence_key="data.flight_id", decode=decode.json(FLIGHT))

        @consumer.foreach_batch
        def load(flights: Any, tx: Any) -> None:
            flown = tx.reject(flights, "data.dep_time is null", NO_DEPARTURE)
            tx.write(flown.select("data.*"), place.sink)

        events = spark.readStream.schema(ENVELOPE_DDL).option("maxFilesPerTrigger", 1).parquet(str(folder / "landing"))
        query = events.writeStream.foreachBatch(consumer).option("checkpointLocation", str(folder / checkpoint))
        query.trigger(availableNow=True).start().awaitTermination()


def main() -> None:
    """Stream in a Spark session of this process."""
    from dedup.spark.session import local_session

    stream(local_session("dedup demo"), *target(os.environ.get(STORE)))


if __name__ == "__main__":
    main()
    leave(SystemExit())

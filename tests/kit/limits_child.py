"""Spark with small limits, in a process of its own: `limits_child.py KIND PLACE MODE FOLDER` prints what became of its batches, as JSON.

MODE: "results": a job may return one megabyte. "heap": a batch that the heap of Spark's JVM is too small for, which ends the JVM.
"1g", "4g": a batch of a gigabyte, with such a heap; 1g is Spark's own default.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from checkpoint.errors import BatchTooLarge
from dedup.verify import verify
from kit.orders import consumer, letters
from kit.places import DeltaPlace, Place, PostgresPlace

SINK, COLUMNS = "order_lines", ["id", "text"]

EVENTS, SIZE = 1_000_000, 1_000


def session(**conf: str) -> Any:
    """Without Delta's jars, which nothing here needs."""
    from pyspark.sql import SparkSession

    from dedup.spark.session import CONF

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]")
    for name, value in {**CONF, "spark.sql.warehouse.dir": sys.argv[4], **conf}.items():
        if "delta" not in value.lower():
            builder = builder.config(name, value)
    return builder.getOrCreate()


def shape(rows: Any, size: int) -> Any:
    """Rows of a frame with `id` as events with bodies of so many bytes."""
    return rows.selectExpr(
        "'orders' topic",
        "'broker' source",
        "0 partition",
        "id sequence_number",
        "id",
        f"cast(repeat(cast(id % 9 as string), {size}) as binary) body",
    )


def writes(place: Place, size: int, **settings: Any) -> Any:
    """A consumer whose handler writes so many bytes for each event, by a job."""
    made = consumer(place.store(), idempotence_key="id", decode=None, **settings)
    made._handler = lambda rows, tx: tx.write(rows.selectExpr("cast(id as string) id", f"repeat('y', {size}) text"), SINK)
    return made


def results(place: Place) -> dict[str, Any]:
    """More than a job may return: as a batch, as what a handler writes of many events, and of one."""
    spark, told = session(**{"spark.driver.maxResultSize": "1m"}), dict[str, Any]()
    told["batch"] = writes(place, 10)(shape(spark.range(0, 64, 1, 2), 40_000), 0).processed
    told["written"] = writes(place, 40_000)(shape(spark.range(64, 128, 1, 2), 10), 1).processed
    for name, bisect in (("one", True), ("whole", False)):
        rows = shape(spark.range(128, 129 if bisect else 192, 1, 2), 10)
        try:
            writes(place, 3_000_000 if bisect else 40_000, bisect=bisect, max_outage=60.0)(rows, 2)
        except BatchTooLarge as error:
            told[name] = str(error)
    return told


def heap(place: Place) -> dict[str, Any]:
    """Four events of 150 MB."""
    stream = session(**{"spark.driver.memory": "512m"}).readStream.format("rate-micro-batch").option("rowsPerBatch", 4).load()
    events = shape(stream.selectExpr("value id"), 150_000_000)
    try:
        writes(place, 10, max_outage=60.0).run(events.writeStream.option("checkpointLocation", f"{sys.argv[4]}/checkpoint"))
    except BatchTooLarge as error:
        return {"heap": str(error)}
    return {}


def gigabyte(place: Place) -> dict[str, Any]:
    """A million events of a kilobyte each, as much written, and else the defaults; memory is that of the Python process, in MB."""
    rows, told = shape(session(**{"spark.driver.memory": sys.argv[3]}).range(0, EVENTS, 1, 4), SIZE), dict[str, Any]()
    begun = time.monotonic()
    try:
        told["processed"] = writes(place, SIZE, max_outage=60.0)(rows, 0).processed
    except BatchTooLarge as error:
        told["error"] = str(error)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {**told, "seconds": round(time.monotonic() - begun), "megabytes": used}


def main() -> None:
    """One of them, and what is in the tables afterwards."""
    place: Place = DeltaPlace(Path(sys.argv[2])) if sys.argv[1] == "delta" else PostgresPlace(sys.argv[2])
    place.create_text_sink(SINK, COLUMNS)
    told = {"results": results, "heap": heap}.get(sys.argv[3], gigabyte)(place)
    store = place.store()
    sizes = Counter((int(row["id"]) // 64, len(row["text"])) for row in place.read_text(SINK, COLUMNS).to_pylist())
    told["sink"] = (
        [[*key, count] for key, count in sorted(sizes.items())] if len(sizes) < 10 else [sizes.total(), len(sizes), *{*sizes.values()}]
    )
    told["letters"], told["contradictions"] = len(letters(store)), verify(store, "shop").contradictions
    print(json.dumps(told, default=str))


if __name__ == "__main__":
    main()

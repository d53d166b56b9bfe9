"""What the tests of handlers of single events share: consumers, shuffled frames, and a driver that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dedup import Consumer
from dedup.core.rows import frame_of
from dedup.core.store import Store
from kit.orders import batch, consumer, orders
from kit.places import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def bare(store: Store, **settings: Any) -> Consumer:
    """A consumer without a handler."""
    made = consumer(store, **settings)
    made._handler = None
    return made


def frame(spark: SparkSession, *events: dict[str, Any], parts: int = 3) -> DataFrame:
    """The events spread over Spark's partitions without regard to theirs, as `minPartitions` or a repartition upstream does."""
    if not events:
        return frame_of(spark, batch(*orders([0]))).where("false")
    return frame_of(spark, batch(*events)).repartition(parts)


def spread(numbers: range, partitions: int = 3) -> list[dict[str, Any]]:
    """Events of several partitions."""
    return [e for p in range(partitions) for e in orders(numbers, partition=p)]


def classic() -> dict[str, str]:
    """The environment of a process that has classic Spark, also where this one has Spark Connect."""
    kept = {"SPARK_SUBMIT_OPTS", "SPARK_LOCAL_DIRS"}  # kit.cheap
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith(("SPARK_", "PYSPARK_"))}


def killed_driver(place: Place, folder: Path) -> None:
    """Run the driver until a handler of its second batch is at work, then SIGKILL; two of its tasks were killed in the first one."""
    said = folder / "said"
    with said.open("w") as out:
        line = [sys.executable, "-m", "kit.foreach_driver", place.where, str(folder), place.kind]
        driver = subprocess.Popen(line, stdout=out, stderr=out, env=classic())
    try:
        while not (folder / "reached").exists():
            assert driver.poll() is None, said.read_text()
            time.sleep(0.1)
    finally:
        driver.kill()
        driver.wait()
    assert len(list(folder.glob("killed *"))) == 2

"""A real streaming query whose batches go to several ways of writing them, one after another, each timed.

The ways take turns at being first; all of them see the same batches on the same machine within the same seconds, so that
what disturbs one of them disturbs all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.events import KAFKA_DDL, PARTITIONS
from benchmarks.where import Way, watched

Seconds = dict[str, list[float]]
"""What was run -> seconds of each of its batches."""

OURS, INSIDE = "ours", " > "


@dataclass(frozen=True)
class Sizes:
    """How much is measured; tests make it tiny."""

    events: int = 50_000  # a batch
    batches: int = 20  # of each contest
    warm: int = 10  # the first of them, for nothing: until then the JVM compiles more than it runs
    keys: int = 1_000_000  # in the table that MERGE looks into
    rounds: int = 4  # of almost empty batches, the first of them for nothing
    empty: int = 8  # batches a round, the first of them for nothing
    letters: int = 1_000_000  # to list and to group
    duplicates: float = 0.01  # share of events that are duplicates
    large: int = 500_000  # events of a large batch
    many: int = 10_000_000  # keys in the larger table that MERGE looks into
    reservations: int = 1_000_000  # whose bytes are counted


def contest(spark: Any, folder: Path, ways: Mapping[str, Way], warm: int) -> Seconds:
    """Seconds that each way took for each batch of the folder, without the first `warm` batches; of the way "ours" by step, too."""
    seconds: Seconds = {name: [] for name in ways}

    def take_turns(batch: Any, batch_id: int) -> None:
        """Run every way on the batch, each time beginning with the next one."""
        names = list(ways)
        turn = batch_id % len(names)
        for name in [*names[turn:], *names[:turn]]:
            begun = time.perf_counter()
            ways[name](batch, batch_id)
            seconds[name].append(time.perf_counter() - begun)

    with clocks(ways) as (ways, steps):
        run_query(spark, folder, take_turns, folder.with_name(f"{folder.name}-checkpoint"), files=PARTITIONS)
    return {name: taken[warm:] for name, taken in (seconds | steps).items()}


@contextmanager
def clocks(ways: Mapping[str, Way]) -> Iterator[tuple[Mapping[str, Way], Seconds]]:
    """These ways, and where the seconds of "ours" go, once they have run: "ours", INSIDE, the step."""
    if OURS not in ways:
        yield ways, {}
        return
    steps: Seconds = {}
    with watched(ways[OURS]) as (ours, found):
        yield {**ways, OURS: ours}, steps
    steps |= {OURS + INSIDE + step: taken for step, taken in found.items()}


def run_query(spark: Any, folder: Path, way: Way, checkpoint: Path, *, files: int) -> list[float]:
    """Run a query to the end of the folder; seconds of each of its batches, as Spark counts them."""
    events = spark.readStream.schema(KAFKA_DDL).option("maxFilesPerTrigger", files).parquet(str(folder))
    query = events.writeStream.foreachBatch(way).option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    return [p.durationMs["triggerExecution"] / 1000 for p in query.recentProgress if "addBatch" in p.durationMs]


def middle(seconds: list[float]) -> float:
    """The median."""
    return statistics.median(seconds)

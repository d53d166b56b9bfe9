"""A batch on Delta beside a year of Kafka's transaction markers, each of which leaves a hole in the positions of its partition.

The year is not played: what a process knows of it, and each summary repeats, is put into the ledger as it would stand there, a stretch of
positions for each 10,000 holes. The rows of the stretches themselves are left out, for no batch of the measure comes near them.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from benchmarks import delta
from benchmarks.events import PARTITIONS, Topic, land
from benchmarks.ours import SINK, arrow_consumer, consumer
from benchmarks.report import Measure, slowness
from benchmarks.stream import Seconds, Sizes, contest
from dedup.delta import state
from dedup.delta.seen import MOST_RANGES, Stretch

A_SECOND = 100
"""Markers in all partitions together: ten producers that commit ten times a second."""

YEAR = 365 * 24 * 3600


def compare(spark: Any, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Two consumers get the same batches in turns; one has a year behind it. Verified."""
    topic = Topic()
    begin = [pa.concat_tables(topic.batch(sizes.events)) for _ in range(2)]
    land((topic.batch(sizes.events) for _ in range(sizes.batches)), folder / "topic")
    homes = {name: folder / name for name in ("none", "year")}
    stretches = YEAR * A_SECOND // MOST_RANGES // PARTITIONS
    for name, home in homes.items():
        delta.create_tables(home)
        with closing(delta.store(home)) as store, mock.patch.object(state, "SUMMARY_EVERY", 1):
            made = arrow_consumer(store)
            made(begin[0], 0)
            if name == "year":
                _plant(store, stretches)
            made(begin[1], 1)
    with closing(delta.store(homes["none"])) as none, closing(delta.store(homes["year"])) as year:
        taken = contest(spark, folder / "topic", {"none": consumer(none), "year": consumer(year)}, sizes.warm)
        assert [len(known.older) for known in _known(year).values()] == [stretches] * PARTITIONS, "the year is not there"
    for home in homes.values():
        delta.verify(home / SINK, topic.facts, once=True)
    return [slowness("delta/markers_year", taken["year"], taken["none"])], {f"markers, {way}": values for way, values in taken.items()}


def _known(store: Any) -> Any:
    return store._states.of("benchmark")._seen.known


def _plant(store: Any, stretches: int) -> None:
    """What this process knows of each partition gets so many stretches, before all that is there; its next decision has a summary of it."""
    width = 2 * MOST_RANGES
    for known in _known(store).values():
        known.older = [Stretch(first, first + width - 2, 1) for first in range(-width * stretches, 0, width)]
        known.reach = -2

"""Memory of the driver's Python against batch size: the most that one batch holds above what the process held before it.

The JVM beside it has the heap that it was given. Only on Linux, which counts the high-water mark and lets it be reset.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks import delta, postgres
from benchmarks.events import Topic, decoded, land
from benchmarks.ours import consumer
from benchmarks.report import Measure, memory
from benchmarks.stream import Seconds, Sizes, Way, contest
from dedup.postgres import PostgresStore

OF = ("postgres", "delta")

Megabytes = dict[str, list[float]]
"""Way -> what each of its batches held at most."""


def compare(spark: Any, dsn: str, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Batches from a tenth to the largest, each with its own topic, beside bringing the decoded rows to Arrow and nothing more."""
    measures, seconds = [], Seconds()
    for events in sorted({sizes.large // 50, sizes.large // 10, sizes.large // 5, sizes.large}):
        found, taken = _at(spark, dsn, folder / str(events), replace(sizes, events=events))
        measures += [memory(f"{name}/driver_memory_{_short(events)}", found[name], found["toArrow"]) for name in OF]
        seconds |= {f"memory, {events:,} events, {name}": values for name, values in taken.items()}
    return measures, seconds


def _at(spark: Any, dsn: str, folder: Path, sizes: Sizes) -> tuple[Megabytes, Seconds]:
    from benchmarks.run import database

    topic = Topic()
    land((topic.batch(sizes.events) for _ in range(4)), folder / "topic")
    delta.create_tables(folder)
    with database(dsn) as own, closing(PostgresStore(own)) as store, closing(delta.store(folder)) as ledger:
        postgres.create_sinks(own)
        held: Megabytes = {}
        ways: dict[str, Way] = {"postgres": consumer(store), "delta": consumer(ledger), "toArrow": _to_arrow}
        watched = {name: _watched(way, held.setdefault(name, [])) for name, way in ways.items()}
        taken = contest(spark, folder / "topic", watched, 1)
        postgres.verify(own, delta.SINK, topic.facts, once=True)
    delta.verify(folder / delta.SINK, topic.facts, once=True)
    return {name: values[1:] for name, values in held.items()}, taken


def _to_arrow(batch: Any, batch_id: int) -> None:
    decoded(batch).toArrow()


def _watched(way: Way, held: list[float]) -> Way:
    def watched(batch: Any, batch_id: int) -> None:
        """Run the way, and note by how many MiB its high-water mark rose."""
        before = _reset()
        way(batch, batch_id)
        held.append((_high_water() - before) / 2**20)

    return watched


def _reset() -> int:
    """Bytes that the process needs now, without what allocators keep; the high-water mark begins again there (proc(5), clear_refs)."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _high_water()


def _high_water() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _short(events: int) -> str:
    return f"{events // 1000}k" if events % 1000 == 0 and events else str(events)

"""How handlers of single events scale with the partitions of a topic: the same events in two partitions, and in one.

The handler is pure Python and takes 50 microseconds of CPU an event: in one partition nothing can help it, in two a second core can.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.events import KAFKA_DDL, ORDER, Topic
from benchmarks.ours import SINK
from benchmarks.postgres import create_sinks, verify
from benchmarks.report import Measure, throughput
from benchmarks.stream import Seconds, Sizes
from dedup import Consumer, decode
from dedup.pipeline.handlers import Event
from dedup.postgres import PostgresStore

HANDLER_SECONDS = 50e-6


SINKS = {"two partitions": SINK, "one partition": "copy_floor"}


def compare(spark: Any, dsn: str, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Two consumers with a sink each take turns, batch by batch; each has the same bodies."""
    create_sinks(dsn)
    topic, loops = Topic(duplicates=0.0), calibrated()
    taken: Seconds = {name: [] for name in SINKS}
    burnt: Seconds = {name: [] for name in SINKS}
    consumers = {name: _consumer(dsn, name, loops) for name in SINKS}
    for number in range(sizes.batches):
        bodies = pa.concat_tables(topic.batch(sizes.events))
        for name in sorted(SINKS, reverse=bool(number % 2)):
            batch = _land(spark, bodies, 1 + (SINKS[name] == SINK), number, folder / name / str(number))
            begun, before = time.perf_counter(), cpu_seconds()
            consumers[name](batch, number)
            taken[name].append(time.perf_counter() - begun)
            burnt[name].append(cpu_seconds() - before)
    for name, sink in SINKS.items():
        verify(dsn, sink, topic.facts, once=True)
        consumers[name].store.close()
    counted, cpu = ({name: seconds[sizes.warm :] for name, seconds in each.items()} for each in (taken, burnt))
    measure = throughput("foreach/scaling", counted["two partitions"], counted["one partition"], sizes.events)
    told = {f"foreach/scaling, {name}": seconds for name, seconds in counted.items()}
    return [measure], told | {f"foreach/scaling, CPU of {name}": seconds for name, seconds in cpu.items()}


def _consumer(dsn: str, name: str, loops: int) -> Consumer:
    made = Consumer(name, PostgresStore(dsn), idempotence_key="data.order_id", decode=decode.json(ORDER), query="benchmark")

    @made.foreach(into=SINKS[name])
    def book(event: Event, tx: Any) -> Any:
        """Return the row of one event, after so many rounds of an empty loop."""
        for _ in range(loops):
            pass
        return event.data

    return made


def _land(spark: Any, bodies: pa.Table, partitions: int, number: int, folder: Path) -> Any:
    """The bodies as the next events of this many partitions, in two files whichever it is."""
    folder.mkdir(parents=True)
    rows = bodies.num_rows
    each = rows // partitions
    places = {"partition": pa.array([n % partitions for n in range(rows)], pa.int32())}
    places["offset"] = pa.array([number * (each + 1) + n // partitions for n in range(rows)], pa.int64())
    for name, column in places.items():
        bodies = bodies.set_column(bodies.column_names.index(name), name, column)
    half = (rows + 1) // 2
    for part, start in enumerate((0, half)):
        pq.write_table(bodies.slice(start, half), folder / f"{part}.parquet")
    return spark.read.schema(KAFKA_DDL).parquet(str(folder))


def calibrated() -> int:
    """Turns of an empty loop that take HANDLER_SECONDS of CPU here: the quickest of several tries, as other processes only slow it down."""
    turns = 200_000
    best = float("inf")
    for _ in range(20):
        begun = time.process_time()
        for _ in range(turns):
            pass
        best = min(best, time.process_time() - begun)
    return max(1, round(turns * HANDLER_SECONDS / best))


def cpu_seconds() -> float:
    """CPU that this process and all below it - the JVM and the Python workers - have used, those that ended included; 0 where not told."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        parents[int(entry.name)] = int(fields[1])
        ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    return sum(used for pid, used in ticks.items() if _is_ours(pid, parents)) / os.sysconf("SC_CLK_TCK")


def _is_ours(pid: int, parents: dict[int, int]) -> bool:
    while pid not in (0, 1, os.getpid()):
        pid = parents.get(pid, 0)
    return pid == os.getpid()

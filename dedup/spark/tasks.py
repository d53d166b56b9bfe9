"""The rows of a batch in Spark's tasks: each partition of a topic is brought to one task, in order, and handled there.

Called by dedup/executors.py through `SparkFeed.tasks`. Works on classic Spark and Spark Connect alike.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from checkpoint.errors import ConfigError
from checkpoint.position import Partition
from dedup import slices
from dedup.decode.prepare import Prepare
from dedup.envelope import POSITION
from dedup.executors import RunTask
from dedup.slices import OUTCOMES
from dedup.spark.prepare import answers, positions
from dedup.spark.prepare import prepare as prepare_columns
from dedup.store import Store

KEPT_STORES = 4
"""Stores of this process of tasks that stay open: a process serves one query at a time, and rarely several."""

ENOUGH = 100_000
"""Rows of a frame that have one in each of its partitions, on clusters of up to so many cores."""

_stores: dict[str, Store] = {}
_told: WeakKeyDictionary[SparkSession, int] = WeakKeyDictionary()


class SparkTasks:
    """A batch as the cluster has it."""

    def __init__(self, batch: DataFrame) -> None:
        self._batch = batch

    @cached_property
    def cores(self) -> int:
        """Tasks that the cluster runs at once, as Spark's own default for new frames."""
        return _cores(self._batch.sparkSession)

    def firsts(self, prepare: Prepare) -> dict[Partition, int]:
        """The lowest sequence number of each partition: one job, which reads the source."""
        rows = positions(self._batch, prepare)
        found = rows.groupBy("source", "topic", "partition").agg(F.min("sequence_number").alias("first")).toArrow().to_pylist()
        return {Partition(r["source"], r["topic"], r["partition"]): r["first"] for r in found if None not in r.values()}

    def pack(self, what: object) -> bytes:
        """What travels to the tasks. Raises ConfigError where the handler, or something that it uses, cannot be pickled."""
        try:
            return bytes(cloudpickle.dumps(what))  # type: ignore[no-untyped-call]
        except Exception as error:
            raise ConfigError(
                f"The handler of events, or something that it or the consumer uses, cannot be sent to Spark's tasks: "
                f"{type(error).__name__}: {error}. Make connections and locks inside the handler, at its first event; or let it run on the "
                f"driver: @consumer.foreach(..., on='driver')."
            ) from error

    def run(self, prepare: Prepare, packed: bytes, tasks: int, *, keep: bool) -> pa.Table:
        """Bring each partition to one task, in order, and run `slices.run` there; returns OUTCOMES.

        Crash: of the driver: tasks that run go on to the end of their transaction, unless a newer driver has fenced them.
        """
        with answers():
            rows = _placed(prepare_columns(self._batch, prepare), tasks)
            return rows.mapInArrow(_in_task(packed, keep), from_arrow_schema(OUTCOMES)).toArrow()

    def each(self, frame: DataFrame, run: RunTask, answers: pa.Schema) -> pa.Table:
        """Bring each partition's rows of a handler's frame to one task, in order, and run this there; returns what it yields."""
        return _placed(frame, max(self.cores, 1)).mapInArrow(run, from_arrow_schema(answers)).toArrow()


def _placed(rows: DataFrame, tasks: int) -> DataFrame:
    """Each partition of a topic in one task, in order."""
    # Partition p of a topic goes to task (p + something of the topic) mod tasks: hashing would leave half of the tasks idle.
    task = F.coalesce(F.pmod(F.col("partition").cast("bigint") + F.hash("source", "topic").cast("bigint"), F.lit(tasks)), F.lit(0))
    return rows.repartitionById(tasks, task.cast("int")).sortWithinPartitions(*POSITION)


def _in_task(packed: bytes, keep: bool) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _run(batches, packed, keep)

    return run


def _run(batches: Iterable[pa.RecordBatch], packed: bytes, keep: bool) -> Iterator[pa.RecordBatch]:
    """`slices.run`; a task without rows opens nothing."""
    rows = (batch for batch in batches if batch.num_rows)
    first = next(rows, None)
    if first is None:
        return
    packed_store, work = pickle.loads(packed)
    store = _kept_store(packed_store)
    try:
        yield from slices.run(_chain(first, rows), work, store)
    finally:
        if not keep:
            store.close()


def _chain(first: pa.RecordBatch, others: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from others


def _kept_store(packed: bytes) -> Store:
    """The store of these settings in this process, with the connections that an earlier task has opened."""
    name = hashlib.sha256(packed).hexdigest()
    if name not in _stores:
        while len(_stores) >= KEPT_STORES:
            _stores.pop(next(iter(_stores))).close()
        _stores[name] = pickle.loads(packed).in_tasks()
    return _stores[name]


def _cores(session: SparkSession) -> int:
    try:
        return int(session.sparkContext.defaultParallelism)
    except (PySparkException, AttributeError):  # Spark Connect does not tell: a small job does, once
        if (known := _told.get(session)) is None:
            known = _told[session] = session.range(ENOUGH).select(F.spark_partition_id()).distinct().count()
        return known
